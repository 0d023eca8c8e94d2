"""The roofline of a compiled program: its operations, bytes and loops, counted by hand."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from experiments.gpu import roofline

# A loop of 7 trips: a slice of the weights, a product, its sum put in place into a stack.
_TEXT = (pathlib.Path(__file__).parent / "loop.hlo").read_text()
_PRODUCT = 2 * 32 * 64 * 64


def test_bytes_are_those_of_the_shapes():
    assert roofline.size_of("(s32[], bf16[7,64]{1,0}, pred[3])") == 4 + 2 * 7 * 64 + 3
    assert roofline.size_of("s4[8]") == 4


def test_every_instruction_counts_as_often_as_its_loop_runs():
    items = roofline.Program(_TEXT).items(flops_per_second=1e12, bytes_per_second=1e9)
    found = {item.name: item for item in items}
    assert set(found) == {"layer", "product", "whole", "kept", "empty"}
    assert found["product"].operations == 7 * _PRODUCT
    rows, layer, result = 2 * 32 * 64, 2 * 64 * 64, 4 * 32 * 64
    assert found["product"].bytes_moved == 7 * (rows + layer + result)
    assert found["product"].source == "jit(f)/dot"
    # A slice is read and written, with the number of the step; an update reads what it writes.
    assert found["layer"].bytes_moved == 7 * (2 * layer + 4)
    assert found["kept"].bytes_moved == 7 * (2 * result + 4)
    assert found["product"].seconds == max(7 * _PRODUCT / 1e12, found["product"].bytes_moved / 1e9)
    assert items == sorted(items, reverse=True)


def test_exchanges_and_products_of_loops_are_found():
    program = roofline.Program(_TEXT)
    (exchange,) = program.collectives()
    assert (exchange.kind, exchange.arrays, exchange.times) == ("all-reduce", ("f32[32,64]",), 7)
    assert exchange.sent(8) == 7 * (2 * 7 / 8) * (4 * 32 * 64)  # in a ring, there and back
    ((dtypes, share),) = program.loop_products()
    assert (set(dtypes), share) == ({"bf16"}, 1.0)
    assert "f32[7,32,64]{2,1,0}" in list(program.shapes())


def test_the_start_of_a_gather_stands_beside_its_operand():
    start = "%g = (bf16[4,8], bf16[32,8]) all-gather-start(%x), dimensions={0}"
    program = roofline.Program(_main(start))
    (exchange,) = program.collectives()
    assert exchange.arrays == ("bf16[32,8]",)
    assert exchange.sent(8) == 7 * 2 * 4 * 8
    assert roofline.Exchange("reduce-scatter", ("f32[4]",), 1).sent(8) == 7 * 4 * 4


def test_a_copy_and_a_permutation_read_and_write_all_once():
    copy = "%c = (f32[8], f32[8], u32[]) copy-start(%x)"
    permutation = "%p = (f32[8], f32[8]) collective-permute-start(%x)"
    program = roofline.Program(_main(copy, permutation))
    rates = {"flops_per_second": 1.0, "bytes_per_second": 1.0}
    found = {item.name: item.bytes_moved for item in program.items(**rates)}
    assert found == {"c": 2 * 4 * 8 + 4, "p": 2 * 4 * 8}
    (exchange,) = program.collectives()
    assert exchange.arrays == ("f32[8]",) and exchange.sent(8) == 4 * 8


def test_a_kernel_takes_the_operations_that_it_is_said_to_have():
    call = 'custom-call(%x), metadata={op_name="jit(f)/signs/pallas_call"}'
    program = roofline.Program(_main(f"%a = f32[8] {call}", f"%b = f32[8] {call}"))
    assert program.kernels() == {"signs"}
    rates = {"flops_per_second": 1.0, "bytes_per_second": 1.0}
    items = program.items(**rates, kernels={"signs": 2000.0, "other": 1.0})
    assert [item.operations for item in items] == [1000.0, 1000.0]


def _main(*lines: str) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n{body}}}\n"


def test_a_loop_of_unknown_length_runs_as_often_as_told():
    unknown = roofline.Program(_TEXT.replace("known_trip_count", "anything"))
    items = unknown.items(flops_per_second=1.0, bytes_per_second=1.0, trips=3)
    assert sum(item.operations for item in items) == 3 * _PRODUCT
    assert {item.name for item in items if not item.is_open} == {"empty"}


def test_a_line_that_ends_too_early_is_named():
    with pytest.raises(ValueError, match="must have whole lines, got '\\(s32"):
        roofline.Program("ENTRY %m (x: f32[]) -> f32[] {\n  %y = (s32[], f32[2] tuple\n")


def test_operations_of_a_program_as_compiled_here():
    def f(weights, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, weights)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((5, 48, 48), (24, 48))]
    # As a dot, not as a call of a library.
    text = jax.jit(f).lower(*shapes).compile({"xla_backend_optimization_level": "0"}).as_text()
    items = roofline.Program(text).items(flops_per_second=1.0, bytes_per_second=1.0)
    assert sum(item.operations for item in items) == 5 * 2 * 24 * 48 * 48
