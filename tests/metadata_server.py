"""Stand-ins for the metadata services of AWS, Google Cloud and Azure, which follow the protocols.

with metadata_server("aws") as service:
    service.notice = in_seconds("aws", 100)
"""

import json
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TOKEN = "AQAE0=="
FAULTS = ("hangs", "status 500", "garbage", "redirects")


def in_seconds(cloud, seconds):
    """The notice of an eviction in so many seconds, as the cloud has it."""
    at = datetime.fromtimestamp(time.time() + seconds, UTC)
    if cloud == "aws":
        return {"action": "terminate", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
    return "TRUE" if cloud == "gcp" else [event("Preempt", format_datetime(at, usegmt=True))]


def event(kind, not_before, resources=("trainer_0",)):
    """One of Azure's; those that it has are documented under "Scheduled Events"."""
    status = "Scheduled" if not_before else "Started"
    found = {"EventId": "C1BF8322", "EventStatus": status, "EventType": kind}
    return found | {"Resources": list(resources), "NotBefore": not_before}


class Metadata(ThreadingHTTPServer):
    """notice: None, or what is answered; fault: one of FAULTS, or "". asked: the paths so far."""

    daemon_threads = True

    def __init__(self, cloud):
        super().__init__(("127.0.0.1", 0), Handler)
        self.cloud = cloud
        self.notice = None
        self.fault = ""
        self.asked = []
        self.statuses = []
        self.ended = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass  # a client that waited no longer


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_PUT(self):
        self.server.asked.append(f"PUT {self.path}")
        seconds = int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", 0))
        if self.server.cloud != "aws" or self.path != "/latest/api/token" or seconds < 1:
            self.answer(400, "")
            return
        self.answer(200, TOKEN)

    def do_GET(self):
        server = self.server
        server.asked.append(f"GET {self.path}")
        if server.fault == "hangs":
            server.ended.wait()
        elif server.fault == "status 500":
            self.answer(500, "an internal error")
        elif server.fault == "garbage":
            self.answer(200, "<html>log in to use this network</html>")
        elif server.fault == "redirects":
            self.answer(302, "", Location=f"{server.address}/elsewhere")
        else:
            self.answer(*getattr(self, server.cloud)(urlsplit(self.path)))

    def answer(self, status, body, **headers):
        self.server.statuses.append(status)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def aws(self, address):
        if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
            return 401, ""
        if address.path != "/latest/meta-data/spot/instance-action" or not self.server.notice:
            return 404, "<html>404 - Not Found</html>"
        return 200, json.dumps(self.server.notice)

    def gcp(self, address):
        if self.headers.get("Metadata-Flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header."
        if address.path != "/computeMetadata/v1/instance/preempted":
            return 404, ""
        return 200, self.server.notice or "FALSE"

    def azure(self, address):
        query = parse_qs(address.query)
        if self.headers.get("Metadata") != "true" or "api-version" not in query:
            return 400, '{"error": "Bad request"}'
        if address.path == "/metadata/instance/compute/name":
            return 200, "trainer_0"
        if address.path != "/metadata/scheduledevents" or query["api-version"] != ["2020-07-01"]:
            return 404, ""
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.server.notice or []})


@contextmanager
def metadata_server(cloud):
    with Metadata(cloud) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
