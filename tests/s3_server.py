# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A real S3 server on the loopback interface (moto's), for tests that go through boto3 and the network."""

import json
import logging
import os
from contextlib import contextmanager
from unittest import mock

import boto3


# What boto3's own chain finds; the server accepts anything.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing-key",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def running_s3(bucket: str = "bucket"):
    """Starts a server with one bucket, in this process's environment too; yields its URL."""
    from moto.backends import get_backend
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        with mock.patch.dict(os.environ, {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": url}):
            boto3.client("s3").create_bucket(Bucket=bucket)
            yield url
    finally:
        server.stop()
        # What is stored belongs to the process, not to the server: the next one would begin with it.
        get_backend("s3").reset()


@contextmanager
def credentials_that_may(*actions: str):
    """In this process's environment: keys that a running server lets do this and nothing else, such as `s3:GetObject`."""
    from moto import settings
    from moto.core.responses import ActionAuthenticatorMixin

    iam = boto3.client("iam", endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"])
    iam.create_user(UserName="user")
    policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": list(actions), "Resource": "*"}]}
    iam.put_user_policy(UserName="user", PolicyName="policy", PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName="user")["AccessKey"]
    names = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
    try:
        with (
            mock.patch.dict(os.environ, names),
            # From the next request on.
            mock.patch.object(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0),
            mock.patch.object(ActionAuthenticatorMixin, "request_count", 0),
        ):
            yield
    finally:
        iam.delete_access_key(UserName="user", AccessKeyId=key["AccessKeyId"])
        iam.delete_user_policy(UserName="user", PolicyName="policy")
        iam.delete_user(UserName="user")
