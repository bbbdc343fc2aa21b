"""A client certificate for `manage.py up`'s own request, where gateways take none without one."""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

#: A model may take long to download before the first token comes.
VALID_DAYS = 30


def show_own_certificate(tls: ssl.SSLContext, authorities: str, data_dir: Path) -> str:
    """Give `tls` a new certificate; returns a file of the authorities that gateways take: those of
    the operator's file and this certificate, which can't sign others. Its key isn't kept anywhere.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    public = _certificate(key).public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with tempfile.NamedTemporaryFile(dir=data_dir) as file:  # ssl reads keys from files alone
        file.write(public + secret)
        file.flush()
        tls.load_cert_chain(file.name)
    path = data_dir / "client-authorities.pem"
    # Gateways that a killed `up` left may still read the old one.
    path.with_suffix(".new").write_bytes(Path(authorities).read_bytes() + b"\n" + public)
    os.replace(path.with_suffix(".new"), path)
    return str(path)


def _certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "manage.py up")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
