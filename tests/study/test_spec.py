from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.errors import InvalidRequest
from draftwood.drafters.none import NoDrafter
from draftwood.study.spec import DrafterSpec, as_specs, parse_option, parse_specs, parse_value, unique


@pytest.mark.parametrize(
    ("word", "name", "options"),
    [
        ("none", "none", {}),
        ("prompt-lookup:gamma=8,max_ngram=3", "prompt-lookup", {"gamma": 8, "max_ngram": 3}),
        ("medusa:checkpoint=/a/b.c,tree=[[0],[0,1]]", "medusa", {"checkpoint": "/a/b.c", "tree": [[0], [0, 1]]}),
        ("a+b:a.x=1,b.y=true", "a+b", {"a": {"x": 1}, "b": {"y": True}}),
        ("d:ids=(1,2),name='x,y'", "d", {"ids": (1, 2), "name": "x,y"}),
        ("d:model=C:\\x=y", "d", {"model": "C:\\x=y"}),
    ],
)
def test_words_are_parted(word, name, options):
    (spec,) = parse_specs(word)
    assert (spec.name, spec.options) == (name, options)


def test_bars_make_a_grid():
    specs = parse_specs("p:gamma=4|8,tree=[1,2]|[3]")
    assert [spec.options for spec in specs] == [
        {"gamma": 4, "tree": [1, 2]},
        {"gamma": 4, "tree": [3]},
        {"gamma": 8, "tree": [1, 2]},
        {"gamma": 8, "tree": [3]},
    ]


@pytest.mark.parametrize("word", ["", ":gamma=1", "p:gamma", "p:gamma=1,", "p:=1"])
def test_malformed_words_are_refused(word):
    with pytest.raises(InvalidRequest):
        parse_specs(word)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0.5", 0.5),
        ("true", True),
        ("True", True),
        ("None", None),
        ("a/b", "a/b"),
        ('{"k": [1]}', {"k": [1]}),
    ],
)
def test_values_are_read_as_json_or_python(text, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@settings(deadline=None)
@given(st.text())
def test_any_value_is_taken(text):
    parse_value(text)
    assert parse_option(f"key={text}")[0] == "key"


options = st.dictionaries(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    st.one_of(
        st.integers(),
        st.booleans(),
        st.lists(st.integers(), max_size=3),
        st.from_regex(r"/[a-z/]{0,9}", fullmatch=True),
    ),
    max_size=3,
)


@settings(deadline=None)
@given(options)
def test_a_label_reads_back_as_its_spec(given_options):
    spec = DrafterSpec("eagle", given_options)
    (again,) = parse_specs(spec.label)
    assert again == spec


def test_compare_takes_names_pairs_and_drafters():
    drafter = NoDrafter()
    assert as_specs("p:gamma=2|4") == [DrafterSpec("p", {"gamma": 2}), DrafterSpec("p", {"gamma": 4})]
    assert as_specs(("p", {"gamma": [2, 4]})) == [DrafterSpec("p", {"gamma": [2, 4]})]
    assert as_specs(drafter)[0].built is drafter
    for wrong in (3, ("p", 3), None):
        with pytest.raises(InvalidRequest, match="a drafter is"):
            as_specs(wrong)


def test_every_study_has_plain_decoding_once_and_first():
    labels = [
        spec.label for spec in unique([DrafterSpec("b"), DrafterSpec("none"), DrafterSpec("a"), DrafterSpec("b")])
    ]
    assert labels == ["none", "b", "a"]


def test_built_drafters_of_one_class_are_told_apart():
    first, second, third = NoDrafter(), NoDrafter(), NoDrafter()
    specs = unique([spec for one in (first, second, first, third) for spec in as_specs(one)])
    assert [spec.label for spec in specs] == ["none", "NoDrafter", "NoDrafter#2", "NoDrafter#3"]
    assert [spec.built for spec in specs[1:]] == [first, second, third]
