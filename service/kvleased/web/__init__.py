"""Own the page at /ui, which operators look at in a browser; `verbs.picturing` decides what it shows."""

from kvleased.web.page import Page

__all__ = ["Page"]
