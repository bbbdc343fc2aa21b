"""The web console: login, playground, overview, and the look of every page."""
