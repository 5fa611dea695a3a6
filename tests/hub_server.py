"""A small server that answers as the Hugging Face hub does, for its real client; and that can fail
as a network does."""

import hashlib
import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


class Hub:
    """Serves `repos`: {"datasets/owner/name" or "owner/name": {path: content}}, and other `files`
    by their address. Requests are recorded in `log` as (method, path, range, token)."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.files: dict[str, bytes] = {}
        self.gated: set[str] = set()
        self.quoting: set[str] = set()  # refused with a message that quotes the token
        self.cut: dict[str, int] = {}  # path -> bytes after which its next download breaks off
        self.go_on = threading.Event()  # a download that is cut waits for it before it breaks off
        self.go_on.set()
        self.failures = 0  # of the next requests, each answered with 503
        self.refused: dict[str, int] = {}  # file -> the status that it is answered with
        self.sizes: dict[str, object] = {}  # file -> the size that is listed in place of its own
        self.sent: dict[str, bytes] = {}  # file -> what is sent in place of what was announced
        self.moved: dict[str, str] = {}  # address -> another, which it redirects to
        self.log: list[tuple[str, str, str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, _ = request.path.partition("?")
        token = request.headers.get("Authorization", "")
        self.log.append((request.command, path, request.headers.get("Range", ""), token))
        if self.failures:
            self.failures -= 1
            return self.send(request, 503)
        if path in self.moved:
            file = path.partition(f"/resolve/{REVISION}/")[2]
            content = next((files[file] for files in self.repos.values() if file in files), b"")
            return self.send(request, 302, content, to=self.moved[path])
        if path in self.files:
            return self.send(request, 200, self.files[path])
        for repo, files in self.repos.items():
            api = f"/api/{repo}" if repo.startswith("datasets/") else f"/api/models/{repo}"
            if not path.startswith((f"{api}/", f"/{repo}/resolve/")) and path != api:
                continue
            if repo in self.gated and token != f"Bearer {TOKEN}":
                return self.send(request, 401, code="GatedRepo")
            if repo in self.quoting:
                return self.send(request, 400, message=f"\x1b[31mno right for {token}")
            if path in (api, f"{api}/revision/main"):
                name = repo.removeprefix("datasets/")
                info = {"id": name, "sha": REVISION, "siblings": [{"rfilename": f} for f in files]}
                return self.send(request, 200, json.dumps(info).encode())
            if path == f"{api}/tree/{REVISION}":
                tree = [
                    {"type": "file", "path": f, "size": self.sizes.get(f, len(c)), "oid": etag(c)}
                    for f, c in files.items()
                ]
                return self.send(request, 200, json.dumps(tree).encode())
            file = path.removeprefix(f"/{repo}/resolve/{REVISION}/")
            if file in self.refused:
                return self.send(request, self.refused[file])
            if file in self.sent and request.command == "GET":
                return self.send(request, 200, self.sent[file])
            if file in files:
                cut = self.cut.pop(file, None) if request.command == "GET" else None
                return self.send(request, 200, files[file], cut=cut)
            return self.send(request, 404, code="EntryNotFound")
        return self.send(request, 401, code="RepoNotFound")

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        content: bytes = b"",
        code: str = "",
        message: str = "",
        cut: int | None = None,
        to: str = "",
    ) -> None:
        tag, begin = etag(content), 0
        asked = request.headers.get("Range", "")
        if asked.startswith("bytes=") and asked.endswith("-"):
            begin, status = int(asked[6:-1]), 206
        body = b"" if to else content[begin:]
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("ETag", f'"{tag}"')
        request.send_header("X-Repo-Commit", REVISION)
        request.send_header("Accept-Ranges", "bytes")
        if status == 206:
            request.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        if to:
            request.send_header("Location", to)
            request.send_header("X-Linked-Size", str(len(content)))
            request.send_header("X-Linked-ETag", f'"{tag}"')
        if code:
            request.send_header("X-Error-Code", code)
        if message:
            request.send_header("X-Error-Message", message)
        request.end_headers()
        if request.command == "GET":
            with suppress(ConnectionError):  # of a client that was killed
                request.wfile.write(body[:cut])
            if cut is not None:  # closes, though more was announced
                self.go_on.wait()


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
