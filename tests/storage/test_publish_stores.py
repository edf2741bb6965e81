"""Weights are published to a store and pulled from it."""

from __future__ import annotations

from pathlib import Path

from published import assert_folder, stepped, weights
from servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server

import bcp

pytest_plugins = ["servers.s3_fixtures"]


def test_weights_are_published_to_s3(server: S3Server, tmp_path: Path) -> None:
    options = {"endpoint_url": server.url, "key": ACCESS_KEY, "secret": SECRET_KEY}
    url, model = server.place(), weights()
    subscriber = bcp.Subscriber(url, tmp_path / "engine", storage_options=options)
    for version in (1, 2, 3, 4):
        model = stepped(model, version)
        bcp.publish(model, url, version, anchor_every=2, keep=1, target_options=options)
        assert subscriber.pull().version == version
        assert_folder(tmp_path / "engine", model)
    assert {name.split("weight_v")[-1][:6] for name in server.names(url) if "weight_v" in name} == {"000003", "000004"}
