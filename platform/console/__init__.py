"""The web console: login, playground, overview and the layout of every page."""
