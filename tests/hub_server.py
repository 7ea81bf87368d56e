# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A model hub on the loopback interface, for the real `huggingface_hub` client: repositories with commits and branches,
large files in a store of another host name, tokens. It refuses what the real one refuses, with the same codes."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from re import fullmatch
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


LARGE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".png", ".arrow")
LARGE_SIZE = 10 * 1024**2


@dataclass(frozen=True)
class Content:
    """One version of a file."""

    data: bytes
    is_large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def git_oid(self) -> str:
        data = self.data
        if self.is_large:
            data = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_large else self.git_oid


@dataclass(frozen=True)
class Commit:
    oid: str
    message: str
    files: dict[str, Content]


@dataclass
class Repository:
    owner: str
    private: bool = False
    history: list[Commit] = field(default_factory=list)
    branches: dict[str, Commit] = field(default_factory=dict)

    def commit(self, branch: str, message: str, files: dict[str, Content]) -> Commit:
        text = f"{len(self.history)} {message} {sorted((name, c.git_oid) for name, c in files.items())}"
        commit = Commit(hashlib.sha1(text.encode()).hexdigest(), message, files)
        self.history.append(commit)
        self.branches[branch] = commit
        return commit


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers
        if code is not None:
            self.headers["X-Error-Code"] = code


class HubServer:
    """
    Args:
        users (`dict[str, str]`): names by token.
    """

    def __init__(self, users: dict[str, str]):
        self.users = users
        self.repositories: dict[str, Repository] = {}
        self.store: dict[str, bytes] = {}
        self.lock = threading.Lock()
        # Repositories to which commits get the answer of a server that is overloaded.
        self.overloaded: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url, self.store_url = f"http://127.0.0.1:{port}", f"http://localhost:{port}"

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, Content]:
        return self.repositories[repo_id].branches[revision].files

    def find(self, repo_id: str, user: str | None) -> Repository:
        repository = self.repositories.get(repo_id)
        if repository is None or (repository.private and repository.owner != user):
            # The real one does not tell strangers whether there is such a repository.
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        return repository

    def find_to_write(self, repo_id: str, user: str | None) -> Repository:
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        repository = self.find(repo_id, user)
        if repository.owner != user:
            raise Refusal(403, "You don't have the rights to write here.")
        return repository

    def find_commit(self, repository: Repository, revision: str) -> Commit:
        if revision in repository.branches:
            return repository.branches[revision]
        for commit in repository.history:
            if commit.oid == revision:
                return commit
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._serve(
            ("/api/whoami-v2", self._whoami),
            ("/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", self._info),
            ("/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", self._tree),
            ("/api/models/([^/]+/[^/]+)/refs", self._refs),
            ("/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
            ("/store/([0-9a-f]{64})", self._download_large),
        )

    do_HEAD = do_GET

    def do_POST(self):
        self._serve(
            ("/api/repos/create", self._create),
            ("/api/validate-yaml", self._validate_yaml),
            ("/api/models/([^/]+/[^/]+)/preupload/([^/]+)", self._preupload),
            ("/api/models/([^/]+/[^/]+)/commit/([^/]+)", self._commit),
            ("/api/models/([^/]+/[^/]+)/branch/([^/]+)", self._create_branch),
            ("/([^/]+/[^/]+)\\.git/info/lfs/objects/batch", self._batch),
        )

    def do_PUT(self):
        self._serve(("/store/([0-9a-f]{64})", self._upload_large))

    def _serve(self, *routes) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        self.body = self._read_body()
        try:
            self.user = self._authenticate()
            for pattern, answer in routes:
                match = fullmatch(pattern, parts.path)
                if match:
                    with self.hub.lock:
                        arguments = [group and unquote(group) for group in match.groups()]
                        return self._send(*answer(*arguments))
            raise Refusal(404, f"No such route: {self.command} {parts.path}")
        except Refusal as refusal:
            # In a header too: the answer to HEAD has no body.
            headers = {"X-Error-Message": refusal.message, **refusal.headers}
            self._send(json.dumps({"error": refusal.message}).encode(), headers, refusal.status)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, body: bytes | dict | list, headers: dict | None = None, status: int = 200) -> None:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _authenticate(self) -> str | None:
        header = self.headers.get("Authorization")
        if urlsplit(self.path).path.startswith("/store/"):
            # Addresses of the store are signed: one that gets a token too refuses, as S3 does.
            if header is not None:
                raise Refusal(400, "Only one auth mechanism allowed")
            return None
        if header is None:
            return None
        user = self.hub.users.get(header.removeprefix("Bearer "))
        if user is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return user

    # ---- Reading ----

    def _whoami(self):
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        return ({"type": "user", "name": self.user, "orgs": []},)

    def _info(self, repo_id, revision):
        repository = self.hub.find(repo_id, self.user)
        commit = self.hub.find_commit(repository, revision or "main")
        siblings = [{"rfilename": name} for name in commit.files]
        return ({"id": repo_id, "sha": commit.oid, "private": repository.private, "tags": [], "siblings": siblings},)

    def _tree(self, repo_id, revision, folder):
        files = self.hub.find_commit(self.hub.find(repo_id, self.user), revision).files
        prefix = f"{folder}/" if folder else ""
        inside = {name: content for name, content in files.items() if name.startswith(prefix)}
        if folder and not inside:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        is_recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = []
        for name, content in sorted(inside.items()):
            if "/" in name.removeprefix(prefix) and not is_recursive:
                directory = {
                    "type": "directory",
                    "path": prefix + name.removeprefix(prefix).split("/")[0],
                    "oid": "0" * 40,
                }
                entries += [] if directory in entries else [directory]
                continue
            entry = {"type": "file", "path": name, "size": len(content.data), "oid": content.git_oid}
            if content.is_large:
                entry["lfs"] = {"oid": content.sha256, "size": len(content.data), "pointerSize": 134}
            entries.append(entry)
        return (entries,)

    def _refs(self, repo_id):
        branches = self.hub.find(repo_id, self.user).branches.items()
        refs = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": c.oid} for name, c in branches]
        return ({"branches": refs, "converts": [], "tags": []},)

    def _resolve(self, repo_id, revision, name):
        commit = self.hub.find_commit(self.hub.find(repo_id, self.user), revision)
        content = commit.files.get(name)
        headers = {"X-Repo-Commit": commit.oid}
        if content is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", **headers)
        headers["ETag"] = f'"{content.etag}"'
        if not content.is_large:
            return content.data, headers
        headers["Location"] = f"{self.hub.store_url}/store/{content.sha256}"
        headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content.data))}
        return b"", headers, 302

    def _download_large(self, sha256):
        return self.hub.store[sha256], {"ETag": f'"{sha256}"'}

    # ---- Writing ----

    def _create(self):
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        wish = json.loads(self.body)
        owner = wish.get("organization") or self.user
        if owner != self.user:
            raise Refusal(403, f"You don't have the rights to create a model under the namespace {owner}.")
        repo_id = f"{owner}/{wish['name']}"
        url = f"{self.hub.url}/{repo_id}"
        if repo_id in self.hub.repositories:
            return {"error": "You already created this model repo", "url": url}, None, 409
        is_private = wish.get("visibility") == "private" or bool(wish.get("private"))
        repository = self.hub.repositories[repo_id] = Repository(owner, is_private)
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LARGE_SUFFIXES)
        repository.commit("main", "initial commit", {".gitattributes": Content(attributes.encode(), False)})
        return {"url": url, "id": repo_id}, None, 201

    def _validate_yaml(self):
        text = json.loads(self.body)["content"]
        try:
            metadata = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else None
        except (yaml.YAMLError, IndexError) as error:
            return {"errors": [{"message": str(error)}], "warnings": []}, None, 400
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        errors = [
            {"message": f'"{name}" must be text'}
            for name in ("license", "library_name", "pipeline_tag")
            if not isinstance((metadata or {}).get(name, ""), str)
        ]
        return {"errors": errors, "warnings": warnings}, None, 400 if errors else 200

    def _preupload(self, repo_id, revision):
        commit = self.hub.find_commit(self.hub.find_to_write(repo_id, self.user), revision)
        answers = []
        for file in json.loads(self.body)["files"]:
            is_large = file["path"].endswith(LARGE_SUFFIXES) or file["size"] > LARGE_SIZE
            present = commit.files.get(file["path"])
            answer = {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
            answers.append({**answer, "oid": present.etag} if present else answer)
        return ({"files": answers},)

    def _batch(self, repo_id):
        self.hub.find_to_write(repo_id, self.user)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.store:
                answer["actions"] = {"upload": {"href": f"{self.hub.store_url}/store/{wanted['oid']}"}}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"}

    def _upload_large(self, sha256):
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise Refusal(400, "The content does not have this SHA-256")
        self.hub.store[sha256] = self.body
        return (b"",)

    def _commit(self, repo_id, revision):
        repository = self.hub.find_to_write(repo_id, self.user)
        if repo_id in self.hub.overloaded:
            raise Refusal(503, "Try again later")
        if revision not in repository.branches:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        head = repository.branches[revision]
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        parent = header["value"].get("parentCommit")
        if parent is not None and not head.oid.startswith(parent):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(head.files)
        for operation in operations:
            value = operation["value"]
            path = value["path"]
            if operation["key"] == "file":
                data = base64.b64decode(value["content"])
                if len(data) > LARGE_SIZE:
                    raise Refusal(400, f"{path} is too large for a commit: upload it as a large file")
                files[path] = Content(data, False)
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.store:
                    raise Refusal(400, f"{path}: there is no such large file")
                files[path] = Content(self.hub.store[value["oid"]], True)
            elif operation["key"] == "deletedFile":
                if path not in files:
                    raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
                del files[path]
            else:
                raise Refusal(400, f"Unknown operation {operation['key']}")
        commit = repository.commit(revision, header["value"]["summary"], files)
        url = f"{self.hub.url}/{repo_id}/commit/{commit.oid}"
        return ({"success": True, "commitOid": commit.oid, "commitUrl": url},)

    def _create_branch(self, repo_id, branch):
        repository = self.hub.find_to_write(repo_id, self.user)
        if branch in repository.branches:
            raise Refusal(409, f"Reference {branch} already exists")
        start = (json.loads(self.body) if self.body else {}).get("startingPoint") or "main"
        repository.branches[branch] = self.hub.find_commit(repository, start)
        return ({"success": True},)
