"""A limit on request bodies that holds before Django spools one to disk, whatever length was announced."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]


class BodyLimit:
    """ASGI wrapper: `application = BodyLimit(get_asgi_application(), settings.MAX_BODY_BYTES)`."""

    def __init__(self, app: App, limit_bytes: int) -> None:
        self.app = app
        self.limit_bytes = limit_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif announced_bytes(scope) > self.limit_bytes:
            await self.refuse(send)
        else:
            try:
                await self.app(scope, self.counting(receive), send)
            except TooLarge:
                # Django reads the whole body before it answers, so nothing of a response was sent yet.
                await self.refuse(send)

    def counting(self, receive: Receive) -> Receive:
        seen_bytes = 0

        async def counted() -> Message:
            nonlocal seen_bytes
            message = await receive()
            seen_bytes += len(message.get("body", b""))
            if seen_bytes > self.limit_bytes:
                raise TooLarge
            return message

        return counted

    async def refuse(self, send: Send) -> None:
        body = too_large_body(self.limit_bytes)
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class TooLarge(Exception):
    """More bytes arrived than a request may have."""


def announced_bytes(scope: MutableMapping[str, Any]) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def too_large_body(limit_bytes: int) -> bytes:
    problem = {
        "type": "body_too_large",
        "title": "Content Too Large",
        "status": 413,
        "detail": f"The request's body is larger than {limit_bytes:,} bytes, the most that is read. Send less at once.",
        "errors": [],
    }
    return json.dumps(problem).encode()
