"""A config arrives in another process as it was sent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.tiny import ARCHITECTURES, make_config
from weft.config.checkpoint import read_checkpoint_config
from weft.config.model import ModelConfig
from weft.config.transport import decode_other, encode_other


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_geometries_arrive_with_their_classes(arch: str, tmp_path: Path) -> None:
    config = make_config(arch)
    config.architectures = [arch]
    config.save_pretrained(tmp_path)
    sent = read_checkpoint_config(tmp_path)
    message = msgspec.msgpack.Encoder(enc_hook=encode_other).encode(sent)
    arrived = msgspec.msgpack.Decoder(ModelConfig, dec_hook=decode_other).decode(message)
    assert arrived == sent and hash(arrived.layer_types)
    assert arrived.mixers.as_dicts() == sent.mixers.as_dicts()
