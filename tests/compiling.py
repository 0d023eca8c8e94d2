"""How programs are compiled where compiling is what costs time: as little as XLA can do."""

# An AdamW step of unlearning compiles in 1.5 against 9 processor seconds, and runs slower.
OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# For the few programs that run longer than they compile; compiler_options outdo the environment.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
# The first for processes.
ENVIRONMENT = {
    "XLA_FLAGS": " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
}
