class AnswerReader:
    head_seen: bool
    keep_alive: bool
    chunked: bool
    surplus: bool
    status: int
    reason: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    fault: str
    done: bool

    def __init__(self, head_max_bytes: int, headers_max: int) -> None: ...
    def start(self) -> None: ...
    def feed(self, data: bytes) -> bytes: ...
    def feed_eof(self) -> bool: ...
