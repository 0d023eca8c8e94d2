"""The check of compiled steps: what it says of texts, and of steps that were made worse."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from experiments.gpu import check
from raslik_jax.run import gpus

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_WHEELS = _ROOT / ".venv-gpu"
_GPU = gpus.GPUS["h100-80gb"]
_KERNELS = "".join(
    f'  %k{place} = f32[8] custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", '
    f'metadata={{op_name="jit(f)/{kernel}/pallas_call"}}\n'
    for place, kernel in enumerate(check.STEPS["sketch_binned"].kernels)
)


def _problems(*lines: str, kernels: str = _KERNELS, gib: float = 1.0) -> list[str]:
    body = "".join(f"  {line}\n" for line in lines)
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n{body}{kernels}}}\n"
    found = check.Compiled(text, gib * 2**30, 1.0, 1.0, params=100_000, vocab=50_304)
    return list(check.problems_of("sketch_binned", found, _GPU))


def test_a_step_that_is_as_it_must_be():
    # A stack of layers may be larger than the logits would be.
    assert _problems("%stack = bf16[32,64,128,11008]{3,2,1,0} copy(%x)") == []


def test_what_a_step_must_not_hold_or_lose():
    gradients = [f"%g{place} = f32[64,100000]{{1,0}} copy(%x)" for place in range(2)]
    assert _problems(*gradients) == ["must hold the gradients [B, P] once, holds them 2 times"]
    (logits,) = _problems("%logits = f32[64,128,50304]{2,1,0} copy(%x)")
    assert logits.startswith("must not hold all logits")
    (lost,) = _problems(kernels=_KERNELS.splitlines(keepends=True)[0])
    assert lost == "must call its kernel mha_backward, calls ['mha_forward']"
    (host,) = _problems("%out = token[] outfeed(%x)")
    assert "the host" in host
    (large,) = _problems(gib=100.0)
    assert large == "must take at most 79.1 GiB, takes 100.0"


def test_more_than_was_stated():
    assert list(check.excess_of(10.2, 0.59, [10.0, 0.6])) == []
    (more,) = check.excess_of(10.4, 0.6, [10.0, 0.6])
    assert more == "must take 10.0 GiB, takes 10.4"
    (slower,) = check.excess_of(10.0, 0.55, [10.0, 0.6])
    assert "60%" in slower and "55%" in slower


# Compiles a step of Pythia-14m three times more: each time as somebody could make it worse.
_WORSE = """
import jax
import jax.numpy as jnp
from experiments.gpu import check
from raslik_jax.models import attention
from raslik_jax.run import gpus
from raslik_jax.sketch import loss

gpus.prepare()
run = check._abstract_run("pythia-14m", gpus.mesh_of("h100-80gb"))
name = "sketch_binned"

def compiled():
    jax.clear_caches()
    return check.compile_step(check.STEPS[name], run)

good = compiled().memory_bytes / 2**30

def problems():
    found = compiled()
    return [
        *check.problems_of(name, found, gpus.GPUS["h100-80gb"]),
        *check.excess_of(found.memory_bytes / 2**30, 1.0, [good, 1.0]),
    ]

policies = jax.checkpoint_policies
kernel, policy = attention.attend_by_kernel, policies.save_only_these_names
attention.attend_by_kernel = lambda *heads, scale: attention._attend_by_products(scale, *heads)
assert any("kernel" in problem for problem in problems()), "a kernel less"
attention.attend_by_kernel = kernel
policies.save_only_these_names = lambda name: policies.everything_saveable
assert any(problem.startswith("must take") for problem in problems()), "more is stored"
policies.save_only_these_names = policy


def plain_nll(table, hidden_TE, label_T, is_counted_T, vocab_axis, cap):
    logits_TV = jax.lax.dot_general(
        hidden_TE, table, (((1,), (1 - vocab_axis,)), ((), ())), preferred_element_type=jnp.float32
    )
    nll_T = jax.nn.logsumexp(logits_TV, -1) - logits_TV[jnp.arange(len(label_T)), label_T]
    return jnp.where(is_counted_T, nll_T, 0.0)


loss.target_nll = plain_nll
assert any("logits" in problem for problem in problems()), "logits are stored"
"""


@pytest.mark.heavy
def test_compiled_steps_are_within_their_bounds_and_worse_ones_are_found():
    if not _WHEELS.is_dir() and importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("XLA's compiler for GPUs is not installed: make .venv-gpu")
    path = os.pathsep.join([str(_ROOT), str(_WHEELS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": ""}
    steps = "--steps=sketch_dense,unlearn_ga_klr,score_int8"
    check_all = ["experiments/gpu/check.py", "--models=pythia-14m", steps, "--items=0"]
    for arguments in (check_all, ["-c", _WORSE]):
        ran = subprocess.run(
            [sys.executable, *arguments], cwd=_ROOT, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
