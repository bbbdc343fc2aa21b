"""Live data of the console's pages: one WebSocket, `/ws/console/`, with topics to subscribe to."""
