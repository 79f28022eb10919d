"""Own how refusals count things: 1 block is, 2 blocks are."""


def counted(count: int, what: str, does: str = "", do: str = "") -> str:
    """Return a count of things, each called `what`, with a verb if given: `does` after one, `do` after several."""
    if count == 1:
        return f"1 {what} {does}".rstrip()
    return f"{count} {what}s {do}".rstrip()


def are(count: int, what: str) -> str:
    """Return a count with its verb: "1 block is", "2 blocks are"."""
    return counted(count, what, "is", "are")


def there_are(count: int, what: str) -> str:
    """Return a count as the beginning of a sentence: "there is 1 cache", "there are 2 caches"."""
    return f"there {'is' if count == 1 else 'are'} {counted(count, what)}"
