"""How programs are compiled where compiling is what costs time: as little as XLA can do."""

import jax

# An AdamW step of unlearning compiles in 1.5 against 9 processor seconds, and runs slower.
OPTIONS: dict[str, int | bool] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# For the few programs that run longer than they compile; compiler_options outdo the environment.
OPTIMIZED: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
# Later versions do not know it, and end the process at a flag that they do not know.
if jax.__version_info__ < (0, 11):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True
# The first for processes.
ENVIRONMENT = {
    "XLA_FLAGS": " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
}
