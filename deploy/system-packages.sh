#!/usr/bin/env bash
# Install the operating system's packages that are missing (Debian and its relatives).
#   run    what serving profits from: a C++ compiler for the CPU kernels
#   test   what the tests use besides: a real Redis, PostgreSQL, PgBouncer, Chromium, node, nginx,
#          Caddy, HAProxy and iproute2
# None of the servers is started: whoever needs one starts it.
# Without apt or the right to use it, says what is missing and goes on: serving works without a
# compiler (slower), and the tests that need a missing program say so.
set -euo pipefail

declare -A commands=([g++]=g++)
if [ "${1:-run}" = test ]; then
  commands+=([redis-server]=redis-server [fc-list]=fontconfig [node]=nodejs [npm]=npm)
  commands+=([chromium-headless-shell]=chromium-headless-shell)
  commands+=([nginx]=nginx-light [caddy]=caddy [openssl]=openssl)
  commands+=([pgbouncer]=pgbouncer [haproxy]=haproxy [ip]=iproute2)
  PATH="$PATH:/usr/sbin"  # where Debian keeps nginx
fi

missing=()
for command in "${!commands[@]}"; do
  command -v "$command" >/dev/null 2>&1 || missing+=("${commands[$command]}")
done
if [ "${1:-run}" = test ]; then
  compgen -G "/usr/lib/postgresql/*/bin/postgres" >/dev/null || missing+=(postgresql)
  fc-list 2>/dev/null | grep -qi dejavu || missing+=(fonts-dejavu-core)
fi
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
if ! command -v apt-get >/dev/null 2>&1; then
  echo "Missing: ${missing[*]} (no apt here; install them your way)" >&2
  exit 0
fi
echo "Installing with apt: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
if ! "${as_root[@]}" apt-get update -qq; then
  echo "apt can't be used (missing: ${missing[*]}); going on without." >&2
  exit 0
fi

# Debian starts a server as soon as it is installed, unless this file says no.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
  "${as_root[@]}" chmod +x "$policy"
  trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
install() { "${as_root[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }
# All at once, or else those that this release has.
install "${missing[@]}" || for package in "${missing[@]}"; do
  install "$package" || echo "apt couldn't install $package; going on without." >&2
done
# Some releases have Chromium only with its windows, which the tests take as well.
if [ "${1:-run}" = test ] && ! command -v chromium-headless-shell chromium >/dev/null; then
  install chromium || echo "apt couldn't install chromium; going on without." >&2
fi
