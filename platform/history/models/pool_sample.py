"""`PoolSample`: how full a model's replicas were."""

from django.db import models


class PoolSample(models.Model):
    """Of one model's replicas together, as they were once in a bucket; wider ones have the mean.

    `active_blocks` are held by running requests, `cached_blocks` by nobody but the prefix cache;
    what is left of `blocks` is empty.
    """

    width = models.PositiveIntegerField(help_text="Seconds.")
    start = models.BigIntegerField(help_text="Seconds since 1970, a multiple of the width.")
    model = models.CharField(max_length=200)
    replicas = models.FloatField(default=0)
    running = models.FloatField(default=0)
    waiting = models.FloatField(default=0)
    blocks = models.FloatField(default=0)
    active_blocks = models.FloatField(default=0)
    cached_blocks = models.FloatField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["width", "start", "model"], name="one_pool_sample")
        ]
