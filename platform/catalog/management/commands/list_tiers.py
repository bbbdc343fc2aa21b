from typing import Any

from catalog.live_status import live_replicas, tiers_of
from common.commands import QuireCommand
from common.effective_settings import size


class Command(QuireCommand):
    help = "List the KV blocks that running replicas have outside the KV cache, by tier."

    def handle(self, *args: Any, **options: Any) -> None:
        """Print a table, and the blocks that couldn't be read."""
        beats = live_replicas()
        self.table(
            (
                *("MODEL", "REPLICA", "TIER", "USED", "CAPACITY", "SWAPPED", "HIT TOKENS"),
                *("EVICTED TOKENS", "SAVED SECONDS"),
            ),
            [
                (
                    beat.model.name,
                    beat.replica_id,
                    tier.name,
                    size(tier.used_bytes),
                    size(tier.capacity_bytes),
                    beat.stats.num_requests_swapped,
                    tier.hit_tokens,
                    tier.evicted_tokens,
                    f"{tier.saved_seconds:.1f}",
                )
                for beat in beats
                for tier in tiers_of(beat)
            ],
        )
        for beat in beats:
            for reason, count in sorted(beat.stats.kv_tier_failures_total.items()):
                self.print_hint(f"{beat.replica_id}: {count} blocks not used or saved: {reason}")
