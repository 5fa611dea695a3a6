"""moto's server of S3 on this machine, which can fail as a network does."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "bucket"


class ObjectStore:
    """Serves the bucket `bucket`. Requests are recorded in `log` as (method, path, range)."""

    def __init__(self) -> None:
        self.cut = 0
        self.app = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIAOFTHETEST",
            "AWS_SECRET_ACCESS_KEY": "secretofthetest",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="AKIAOFTHETEST",
            aws_secret_access_key="secretofthetest",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket=BUCKET)
        self.reset()

    def reset(self) -> None:
        """Without an object and without faults."""
        self.log: list[tuple[str, str, str]] = []
        self.failures = 0  # of the next requests, each answered with 503
        self.cut = 0  # of the next answers with a body, each breaks off in its middle
        self.ignores_conditions = False  # writes all the same
        self.refuses_conditions = False  # answers 501
        self.refuses_deletes = False  # answers 403
        self.holds: Callable[[str], bool] = lambda request: False  # "METHOD path": waits for go_on
        self.go_on = threading.Event()
        for key in self.keys():
            self.delete(key)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        is_client = "Boto3" in environ.get("HTTP_USER_AGENT", "")  # of the test itself
        if not is_client:
            self.log.append((method, path, environ.get("HTTP_RANGE", "")))
            if self.holds(f"{method} {path}"):
                self.go_on.wait()
            if self.failures:
                self.failures -= 1
                start("503 Slow Down", [("Content-Length", "0")])
                return []
            if self.refuses_deletes and method == "DELETE":
                start("403 Forbidden", [("Content-Length", "0")])
                return []
            if environ.get("HTTP_IF_NONE_MATCH"):
                if self.refuses_conditions:
                    body = b"<Error><Code>NotImplemented</Code><Message>no</Message></Error>"
                    start("501 Not Implemented", [("Content-Length", str(len(body)))])
                    return [body]
                if self.ignores_conditions:
                    del environ["HTTP_IF_NONE_MATCH"]
        answer = self.app(environ, start)
        if self.cut and method == "GET" and not is_client and environ.get("HTTP_RANGE"):
            self.cut -= 1
            return _half(b"".join(answer))
        return answer


def _half(body: bytes) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionError("cut by the test")
