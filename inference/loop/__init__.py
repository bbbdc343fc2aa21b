"""An event loop's turns and the threads beside it."""
