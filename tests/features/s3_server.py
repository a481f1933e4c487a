"""The fixture `s3`: an S3 server (moto) in this process that makes faults and counts what is read.

s3.fs.pipe("bucket/key", content)  # the bucket is there
s3.faults = ["500", "reset"]  # of the next two requests for an object's bytes
"""

import logging
import os
import socket
import struct
import threading
import time
from importlib.util import find_spec
from urllib.parse import parse_qs

import fsspec
import pytest

ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"
ANSWERS = {
    "500": ("500 Error", "InternalError", "We encountered an internal error. Please try again."),
    "503": ("503 Slow", "SlowDown", "Please reduce your request rate."),
    "403": ("403 Forbidden", "AccessDenied", "Access Denied"),
}


class S3:
    """faults: names of ANSWERS, "reset", "truncate", "slow" or "", one per GET of an object.

    faults_of_writes: the same, one per PUT, POST or DELETE; "lost": it is done, and not answered.
    every: the fault of each request of any kind while it is set. fetched: bytes of bodies of GET.
    """

    def __init__(self, moto):
        self.moto = moto
        self.faults = []
        self.faults_of_writes = []
        self.every = ""
        self.fetched = 0
        self.lock = threading.Lock()

    def __call__(self, environ, start_response):
        method = environ["REQUEST_METHOD"]
        is_list = "list-type" in parse_qs(environ["QUERY_STRING"])
        is_get = method == "GET" and not is_list and environ["PATH_INFO"].count("/") > 1
        with self.lock:
            fault = self.every
            if is_get and self.faults:
                fault = self.faults.pop(0)
            if method in ("PUT", "POST", "DELETE") and self.faults_of_writes:
                fault = self.faults_of_writes.pop(0)
        if fault in ANSWERS:
            status, *words = ANSWERS[fault]
            start_response(status, [("Content-Type", "application/xml")])
            yield ERROR.format(*words).encode()
            return
        if fault != "reset":
            body = b"".join(self.moto(environ, start_response))
        if fault in ("reset", "lost"):
            connection = environ["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RD)  # no further request of this connection
            connection.close()
            raise ConnectionResetError
        if is_get:
            with self.lock:
                self.fetched += len(body)
        if fault == "truncate":
            body = body[: len(body) // 2]
        part = -(-len(body) // 4) if fault == "slow" else len(body)
        for start in range(0, len(body), max(part, 1)):
            time.sleep(0.2 if fault == "slow" else 0)
            yield body[start : start + part]


@pytest.fixture
def s3(monkeypatch):
    """A server with the bucket `bucket`; environment variables lead to it."""
    if not all(map(find_spec, ("s3fs", "moto", "flask"))):
        pytest.skip("needs s3fs and moto: bash tests/engines.sh")
    from moto.core.base_backend import BackendDict
    from moto.moto_server import werkzeug_app
    from werkzeug.serving import make_server

    BackendDict.reset()  # its buckets belong to the process
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    made = S3(werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app))
    handler = werkzeug_app.MotoRequestHandler
    server = make_server("127.0.0.1", 0, made, threaded=True, request_handler=handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    made.fs = fsspec.filesystem("s3", skip_instance_cache=True)
    made.fs.mkdir("bucket")
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another server
    yield made
    server.shutdown()
    server.server_close()
    thread.join()
