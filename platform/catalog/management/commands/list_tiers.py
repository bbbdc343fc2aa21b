"""`manage.py list_tiers`."""

from typing import Any

from catalog.live_status import live_replicas
from common.commands import QuireCommand
from common.effective_settings import size


class Command(QuireCommand):
    """List the KV tiers of running replicas."""

    help = "List the KV blocks that running replicas have outside the KV cache, by tier."

    def handle(self, *args: Any, **options: Any) -> None:
        """Print a table, and the blocks that couldn't be used."""
        beats = [beat for beat in live_replicas() if beat.stats.kv_tier_bytes]
        self.table(
            ("MODEL", "REPLICA", "TIER", "USED", "CAPACITY", "SWAPPED", "HIT TOKENS"),
            [
                (
                    beat.model.name,
                    beat.replica_id,
                    tier,
                    size(used),
                    size(beat.stats.kv_tier_capacity_bytes.get(tier, 0)),
                    beat.stats.num_requests_swapped,
                    beat.stats.external_prefix_cache_hits_total,
                )
                for beat in beats
                for tier, used in sorted(beat.stats.kv_tier_bytes.items())
            ],
        )
        for beat in beats:
            for reason, count in sorted(beat.stats.kv_tier_failures_total.items()):
                self.print_hint(f"{beat.replica_id}: {count} blocks not used or saved: {reason}")
