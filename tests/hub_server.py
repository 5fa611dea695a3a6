"""A small server that answers as the Hugging Face hub does, for its real client; and that can fail
as a network does."""

import hashlib
import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import unquote

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
        self.cut_from = 0  # begin of the range of which that download is
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
        path, _, query = request.path.partition("?")
        token = request.headers.get("Authorization", "")
        self.log.append((request.command, path, request.headers.get("Range", ""), token))
        if self.failures:
            self.failures -= 1
            return self.send(request, 503)
        if path in self.moved:
            file = path.partition("/resolve/main/")[2]
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
            if path == f"{api}/tree/main" or path.startswith(f"{api}/tree/main/"):
                folder = unquote(path.removeprefix(f"{api}/tree/main")).lstrip("/")
                tree = [
                    {"type": "file", "path": f, "size": self.sizes.get(f, len(c)), "oid": etag(c)}
                    for f, c in files.items()
                    if "recursive=true" in query.lower() or f.rpartition("/")[0] == folder
                    if f.startswith(f"{folder}/" if folder else "")
                ]
                names = {str(parent) for f in files for parent in PurePosixPath(f).parents}
                tree += [
                    {"type": "directory", "path": name, "oid": "0"}
                    for name in names - {".", "/", folder}
                    if name.rpartition("/")[0] == folder  # of the ones below, no test has need
                ]
                if folder and not tree:
                    return self.send(request, 404, code="EntryNotFound")
                return self.send(request, 200, json.dumps(tree).encode())
            file = path.removeprefix(f"/{repo}/resolve/main/")
            if file in self.refused:
                return self.send(request, self.refused[file])
            if file in self.sent and request.command == "GET":
                return self.send(request, 200, self.sent[file], ranges=False)
            if file in files:
                asked = request.headers.get("Range", "").startswith(f"bytes={self.cut_from}-")
                cut = self.cut.pop(file, None) if asked else None
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
        ranges: bool = True,
    ) -> None:
        tag, asked = etag(content), request.headers.get("Range", "")
        part, begin = content, 0
        if status == 200 and asked and ranges:
            begin, end = map(int, asked.removeprefix("bytes=").split("-"))
            part, status = content[begin : end + 1], 206
        body = b"" if to else part
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("ETag", f'"{tag}"')
        request.send_header("X-Repo-Commit", REVISION)
        request.send_header("Accept-Ranges", "bytes")
        if status == 206:
            last = begin + len(part) - 1
            request.send_header("Content-Range", f"bytes {begin}-{last}/{len(content)}")
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
