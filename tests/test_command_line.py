# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import argparse

import pytest

from hf_dflash.command_line import CommandParser, at_least_one, available_device


@pytest.fixture
def parser():
    parser = CommandParser()
    parser.add_argument("--max-length", type=int)
    parser.add_argument_group("more").add_argument("--top_p", type=float)
    parser.add_argument("--thinking-on", action=argparse.BooleanOptionalAction)
    parser.add_argument("rest", nargs="*")
    return parser


@pytest.mark.parametrize("spelling", ["--max-length", "--max_length"])
@pytest.mark.parametrize("equals", [True, False])
def test_hyphens_and_underscores_mean_the_same(parser, spelling, equals):
    value = [f"{spelling}=7"] if equals else [spelling, "7"]
    assert parser.parse_args(value).max_length == 7


def test_an_option_declared_with_underscores_takes_hyphens_too(parser):
    assert parser.parse_args(["--top-p", "0.5"]).top_p == 0.5


def test_a_switch_is_turned_off_in_either_spelling(parser):
    assert parser.parse_args(["--no_thinking_on"]).thinking_on is False


def test_values_are_left_as_they_are(parser):
    given = parser.parse_args(["--max_length", "1", "a_b", "--", "--top_q"])
    assert given.rest == ["a_b", "--top_q"]


def test_an_unknown_option_is_named_as_it_was_typed(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--no_such_thing"])
    assert "--no_such_thing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--device", "cuda:99"], "argument --device: there is no cuda:99 here: torch sees"),
        (["--device", "gpu"], "argument --device: 'gpu' is no device"),
        (["--limit", "0"], "argument --limit: must be at least 1, but is 0"),
        (["--limit", "many"], "argument --limit: must be a whole number, but is 'many'"),
        (["--limit", "-2"], "argument --limit: must be at least 1, but is -2"),
    ],
)
def test_a_device_that_is_not_there_and_a_count_of_none_are_refused_by_option(capsys, option, message):
    parser = CommandParser()
    parser.add_argument("--device", type=available_device)
    parser.add_argument("--limit", type=at_least_one)
    assert parser.parse_args(["--device", "cpu", "--limit", "3"]) == argparse.Namespace(device="cpu", limit=3)
    with pytest.raises(SystemExit):
        parser.parse_args(option)
    assert message in capsys.readouterr().err


def test_a_mistake_is_not_pushed_out_of_sight_by_the_usage(parser, capsys):
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["--max-length", "long"])
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert lines[0].endswith("error: argument --max-length: invalid int value: 'long'") and len(lines) == 2
