"""Own the end of a request that asks whether to send its body, and is answered without being told to send it."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_EXPECT: Final = b"expect"


class Uninvited:
    """An app whose answer to `Expect: 100-continue` ends the connection if it comes before the body was asked for.

    The caller need not send the body then, and what it sends next would be taken for it.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Take the app."""
        self._app = app

    def __repr__(self) -> str:
        """Show the app."""
        return f"<Uninvited {self._app!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if all(name != _EXPECT for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        is_invited = False

        async def invite() -> Message:
            nonlocal is_invited
            is_invited = True
            return await receive()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_invited:
                scope["extensions"]["pass_over_body"]()
            await send(message)

        await self._app(scope, invite, answer)
