"""A local S3-compatible server (moto) that can inject faults."""

import io
import logging
import threading
import urllib.request

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class _Quiet(WSGIRequestHandler):
    def log(self, *args):
        pass


class Server:
    """Handles S3 requests in memory.

    **Attributes:**

    - `fault`: called with method and path before each request is handled. Returns None to respond normally, a status code,
        such as 503, to respond with that, or `"cut"` to truncate the response body.
    - `after`: called with method and path after a request is handled and before the response is sent.
    - `requests`: methods and paths of the requests so far.
    """

    def __init__(self):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.fault = self.after = lambda method, path: None
        self.requests = []
        self._one = threading.Lock()  # moto checks conditions and writes without a lock of its own
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _answer(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if environ.get("QUERY_STRING"):
            path += "?" + environ["QUERY_STRING"]
        size = environ.get("CONTENT_LENGTH")
        if size:  # a fault may end the client: what it was sending is stored whole or, as by real stores, not at all
            content = environ["wsgi.input"].read(int(size))
            if len(content) < int(size):
                start_response("400 IncompleteBody", [("Content-Length", "0")])
                return [b""]
            environ["wsgi.input"] = io.BytesIO(content)
        self.requests.append((method, path))
        fault = self.fault(method, path)
        if isinstance(fault, int):
            start_response(f"{fault} Fault", [("Content-Length", "0")])
            return [b""]
        with self._one:
            body = list(self._app(environ, start_response))
        self.after(method, path)
        if fault == "cut":
            content = b"".join(body)
            return [content[: len(content) // 2]]
        return body

    def make_bucket(self, name):
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"), timeout=30).close()

    def environment(self):
        """Environment variables with which a process reaches the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=30)
