"""Models that see: native vision towers, their connectors, and the decoder behind them."""
