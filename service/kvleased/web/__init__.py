"""Own the page at /ui: what an operator looks at in a browser. What it shows is `verbs.picturing`'s business."""

from kvleased.web.page import Page

__all__ = ["Page"]
