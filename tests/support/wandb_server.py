"""A local server that answers the W&B client, and servers that do not answer."""

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandBServer(ThreadingHTTPServer):
    """Server that stores the history of one run as W&B does: each line at the offset it names."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.history: list[str] = []
        self.alerts: list[str] = []
        self.files: set[str] = set()
        self.silent = threading.Event()
        """While set, requests are read and never answered."""

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The history, one row per step."""
        return [json.loads(line) for line in self.history]

    @property
    def steps(self) -> list[int]:
        """The steps of the history."""
        return [row["_step"] for row in self.rows]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the client closes connections at any time."""

    def stream(self, files: dict[str, Any]) -> None:
        """Store lines of the history at their offset."""
        chunk = files.get("wandb-history.jsonl")
        if chunk:
            lines = chunk["content"]
            self.history[chunk["offset"] : chunk["offset"] + len(lines)] = lines

    def answer(self, query: str, variables: dict[str, Any]) -> Any:
        """Answer a GraphQL query."""
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": self._run(variables["name"]), "inserted": True}}
        if "RunResumeStatus" in query and self.history:
            return {"model": {**_PROJECT, "bucket": self._resumable(variables["name"])}}
        if "createRunFiles" in query:
            names = variables["files"]
            files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in names]
            return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": files}}
        if "notifyScriptableRunAlert" in query:
            self.alerts.append(variables["text"])
            return {"notifyScriptableRunAlert": {"success": True}}
        return {}

    def _run(self, name: str) -> dict[str, Any]:
        return {"id": "id", "name": name, "displayName": name, "project": _PROJECT, "config": "{}"}

    def _resumable(self, name: str) -> dict[str, Any]:
        return self._run(name) | {
            "summaryMetrics": self.history[-1],
            "logLineCount": 0,
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "historyTail": json.dumps(self.history[-1:]),
            "eventsTail": "[]",
            "tags": [],
            "notes": "",
            "wandbConfig": json.dumps({"t": 1}),
        }


_PROJECT = {"id": "p", "name": "project", "entity": {"id": "e", "name": "entity"}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandBServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer the probe."""
        self._answer({})

    def do_PUT(self) -> None:
        """Store the name of an uploaded file."""
        self._body()
        self.server.files.add(self.path.removeprefix("/put/"))
        self._answer({})

    def do_POST(self) -> None:
        """Answer a GraphQL query, or store lines of the history."""
        body = self._body()
        answer: Any = {}
        if self.server.silent.is_set():
            threading.Event().wait()
        elif self.path == "/graphql":
            request = json.loads(body)
            data = self.server.answer(request["query"], request.get("variables") or {})
            answer = {"data": data}
        elif self.path.endswith("/file_stream"):
            self.server.stream(json.loads(body).get("files") or {})
        self._answer(answer)

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def wandb_server() -> Iterator[WandBServer]:
    """Run a server that answers."""
    server = WandBServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def silent_server() -> Iterator[str]:
    """Run a server that accepts connections and never answers; yields its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def closed_port() -> Iterator[str]:
    """Yield an address without a server, which no other process can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"
