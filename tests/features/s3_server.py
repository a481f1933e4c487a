"""An S3 server (moto) in this process, behind a proxy that counts what is fetched and makes faults.

with s3_server() as s3:
    s3.put("bucket/key", content)
    s3.faults = ["500", "reset"]  # of the next two requests for an object's bytes
"""

import http.client
import socket
import struct
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"
ANSWERS = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "403": (403, "AccessDenied", "Access Denied"),
}
WRITES = ("PUT", "POST", "DELETE")


class Proxy(ThreadingHTTPServer):
    """faults: names of ANSWERS, "reset", "truncate", "slow" or "", one per GET of an object.

    faults_of_writes: the same, one per PUT, POST or DELETE; "lost": it is done, and not answered.
    every: the fault of each request of any kind while it is set. fetched: bytes of bodies of GET.
    """

    daemon_threads = True

    def __init__(self, backend_port):
        super().__init__(("127.0.0.1", 0), Handler)
        self.backend_port = backend_port
        self.faults = []
        self.faults_of_writes = []
        self.every = ""
        self.fetched = 0
        self.lock = threading.Lock()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, path, content):
        connection = http.client.HTTPConnection("127.0.0.1", self.backend_port)
        bucket = path.partition("/")[0]
        for address, body in ((bucket, None), (path, content)):
            signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20200101/us-east-1/s3/aws4"}
            connection.request("PUT", f"/{address}", body, signed)
            connection.getresponse().read()

    def handle_error(self, request, client_address):
        pass  # a client that went away


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        address = urlsplit(self.path)
        is_list = "list-type" in parse_qs(address.query) or address.path.count("/") < 2
        is_get = self.command == "GET" and not is_list
        with self.server.lock:
            fault = self.server.every
            if is_get and self.server.faults:
                fault = self.server.faults.pop(0)
            if self.command in WRITES and self.server.faults_of_writes:
                fault = self.server.faults_of_writes.pop(0)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault == "reset":
            self.reset()
            return
        if fault in ANSWERS:
            status, code, message = ANSWERS[fault]
            self.answer(status, [("Content-Type", "application/xml")], ERROR.format(code, message))
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.backend_port)
        connection.request(self.command, self.path, body, headers=dict(self.headers))
        response = connection.getresponse()
        body = response.read()
        if fault == "lost":
            self.reset()
            return
        if is_get and response.status < 300:
            with self.server.lock:
                self.server.fetched += len(body)
        headers = [
            (name, value)
            for name, value in response.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "date", "server")
        ]
        self.answer(response.status, headers, body, fault)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def answer(self, status, headers, body, fault=""):
        body = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        if not any(name.lower() == "content-length" for name, _ in headers):
            headers = [*headers, ("Content-Length", str(len(body)))]
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "truncate":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if fault == "slow":
            for start in range(0, len(body), -(-len(body) // 4)):
                self.wfile.write(body[start : start - (-len(body) // 4)])
                self.wfile.flush()
                time.sleep(0.2)
            return
        self.wfile.write(body)

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


@contextmanager
def s3_server():
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    proxy = Proxy(moto.get_host_and_port()[1])
    connection = http.client.HTTPConnection("127.0.0.1", proxy.backend_port)
    connection.request("POST", "/moto-api/reset")  # its buckets belong to the process
    connection.getresponse().read()
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
        moto.stop()
