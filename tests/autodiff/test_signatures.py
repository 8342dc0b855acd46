"""A rule's signature is the operator's schema: inputs in order, attributes with their defaults."""

from __future__ import annotations

import inspect
import math

import onnx
import pytest

from ortrain.autodiff.registry import registered
from ortrain.ops import OPERATORS

RULES = {name: entry.rule for name, entry in registered().items() if entry.rule is not None}
STANDARD = sorted(name for name in RULES if "::" not in name)
OURS = sorted(name for name in RULES if name.startswith("ortrain::"))
SHARED = {name for name in RULES if list(RULES.values()).count(RULES[name]) > 1}
OPSETS = range(18, onnx.defs.onnx_opset_version() + 1)


def schemas(name):
    """The schemas that hold at one of the opsets."""
    found = {}
    for opset in OPSETS:
        try:
            schema = onnx.defs.get_schema(name, opset)
        except onnx.defs.SchemaError:
            continue
        found[schema.since_version] = schema
    return found


def split(rule):
    """Names of the inputs (None: any number), and the attributes with their defaults."""
    parameters = list(inspect.signature(rule).parameters.values())[1:]
    attributes = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None, attributes
    return [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD], attributes


@pytest.mark.parametrize("name", STANDARD)
def test_a_rule_takes_the_inputs_of_its_operator(name):
    inputs, _ = split(RULES[name])
    option = onnx.defs.OpSchema.FormalParameterOption
    for schema in schemas(name).values():
        if inputs is None:
            assert schema.inputs[-1].option == option.Variadic
            continue
        assert len(inputs) == len(schema.inputs)
        for mine, theirs in zip(inputs, schema.inputs, strict=True):
            if theirs.option == option.Optional:
                assert mine.default is None, f"{mine.name} is optional"
            elif name not in SHARED:
                assert mine.default is inspect.Parameter.empty, f"{mine.name} is required"


@pytest.mark.parametrize("name", STANDARD)
def test_a_rule_takes_the_attributes_of_its_operator_with_their_defaults(name):
    _, attributes = split(RULES[name])
    known = {}
    for schema in schemas(name).values():
        known.update(schema.attributes)
    assert set(attributes) == set(known)
    for attribute, theirs in known.items():
        mine = attributes[attribute]
        if theirs.required:
            assert mine is inspect.Parameter.empty, f"{attribute} is required"
        elif not theirs.default_value.type:
            assert mine is None, f"{attribute} has no default"
        else:
            default = onnx.helper.get_attribute_value(theirs.default_value)
            default = default.decode() if isinstance(default, bytes) else default
            if isinstance(default, list):
                default = [each.decode() for each in default]
            if isinstance(default, float):
                assert math.isclose(mine, default, rel_tol=1e-6), attribute
            else:
                assert mine == default, attribute


@pytest.mark.parametrize("name", OURS)
def test_a_rule_of_our_operators_has_the_signature_of_their_body(name):
    body = OPERATORS[name.removeprefix("ortrain::")].body
    theirs = list(inspect.signature(body).parameters.values())[1:]
    mine = list(inspect.signature(RULES[name]).parameters.values())[1:]
    assert [(p.kind, p.default) for p in mine] == [(p.kind, p.default) for p in theirs]
    assert [p.name for p in mine if p.kind is p.KEYWORD_ONLY] == [
        p.name for p in theirs if p.kind is p.KEYWORD_ONLY
    ]


def test_every_operator_that_is_registered_exists():
    for name in registered():
        if name.startswith("ortrain::"):
            assert name.removeprefix("ortrain::") in OPERATORS
        elif "::" not in name:
            assert onnx.defs.has(name), name
