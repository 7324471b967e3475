"""The rungs that a GPU kernel climbs without a GPU: its lowered Triton IR, run; its machine code, read.

The rung below them, Pallas' interpret mode, needs nothing from here. `lowered_ttir_run` takes plain JAX; `aot` takes the
CUDA plugin, ptxas and nvdisasm, which `make gpu-check` installs.
"""
import re, subprocess, sysconfig, tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
import jax, numpy as np
from jax.extend import core
from deviceless import as_gpu, compile_for_gpu, lower_for_cuda, shape
from ttir import run_call, triton_calls

# Lowered Triton IR

def lowered_ttir_run(f, *args, arch='sm_90a'):
    "What `f(*args)` gives on a GPU: its Pallas calls as the Triton IR they lower to, in numpy; the rest on the CPU."
    with as_gpu(arch): closed, result = jax.make_jaxpr(f, return_shape=True)(*args)
    out = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), arch)
    return jax.tree.unflatten(jax.tree.structure(result), out)

CALLS = ('jit', 'pjit', 'closed_call', 'custom_vjp_call', 'custom_jvp_call') # only name a jaxpr and run it

def _evaluate(jaxpr, consts, args, arch):
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda v: v.val if isinstance(v, core.Literal) else known[v]
    for eqn in jaxpr.eqns:
        given = [read(v) for v in eqn.invars]
        inner = eqn.params.get('jaxpr', eqn.params.get('call_jaxpr'))
        if eqn.primitive.name == 'pallas_call': out = _run_kernel(eqn, given, arch)
        elif hasattr(inner, 'consts') and eqn.primitive.name in CALLS:
            out = _evaluate(inner.jaxpr, inner.consts, given, arch)
        else:
            assert 'pallas_call' not in str(inner), f'a kernel inside {eqn.primitive.name}'
            out = eqn.primitive.bind(*given, **eqn.params)
            if not eqn.primitive.multiple_results: out = [out]
        known.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]

def _run_kernel(eqn, given, arch):
    [call] = triton_calls(lower_for_cuda(jax.jit(lambda *xs: eqn.primitive.bind(*xs, **eqn.params)), *given, arch=arch))
    results = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    return [jax.numpy.asarray(y) for y in run_call(call, [np.asarray(x) for x in given], results)]

# Machine code

@dataclass(frozen=True)
class Kernel:
    "One kernel of a compiled program."
    registers: int # a thread's
    spills: int # bytes stored and loaded for want of registers
    stack: int # bytes of a thread's stack frame
    sass: str # its machine code

    def uses(self, instruction): # 'HMMA', say
        return re.search(rf'\b{instruction}\b', self.sass) is not None

@dataclass(frozen=True)
class Program:
    "A compiled program: its kernels by name, and its executable, which knows about memory and aliases."
    kernels: dict[str, Kernel]
    executable: object

    def kernel(self, prefix): # the only one whose name starts so
        [found] = [k for name,k in self.kernels.items() if name.startswith(prefix)]
        return found
    @property
    def memory(self): return self.executable.get_compiled_memory_stats()

def aot(f, *args, arch='sm_90a'):
    "`f` compiled for a GPU that isn't there; `args` are arrays or shapes; a jitted `f` keeps its donations."
    place = lambda a: shape(a.shape, a.dtype)
    lowered = lower_for_cuda(f if hasattr(f, 'trace') else jax.jit(f), *jax.tree.map(place, args), arch=arch)
    with tempfile.TemporaryDirectory() as folder:
        executable = compile_for_gpu(lowered, arch, xla_dump_to=folder, xla_dump_emitter_re='ptx')
        files = [path for path in sorted(Path(folder).glob('*.ptx')) if path.stat().st_size > 16]
        with ThreadPoolExecutor(2) as pool: found = list(pool.map(partial(assemble, arch=arch), files))
        kernels = {name: kernel for own in found for name,kernel in own.items()}
    return Program(kernels, executable)

def tool(name): # from the wheels beside JAX's plugin
    return Path(sysconfig.get_paths()['purelib']) / 'nvidia/cu13/bin' / name

def assemble(ptx:Path, arch) -> dict[str, Kernel]:
    "The kernels of a PTX file."
    cubin, run = ptx.with_suffix('.cubin'), lambda *command: subprocess.run(command, capture_output=True, text=True, check=True)
    said = run(tool('ptxas'), '--verbose', f'--gpu-name={arch}', ptx, '--output-file', cubin).stderr
    sass = run(tool('nvdisasm'), '--print-code', cubin).stdout
    figures = re.compile(r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
                         r"(\d+) bytes spill loads.*?Used (\d+) registers", re.S)
    bodies = dict(re.findall(r'\.text\.(\S+):\n(.*?)(?=\n\s*\.section|\Z)', sass, re.S))
    return {name: Kernel(int(registers), int(stores) + int(loads), int(stack), bodies.get(name, sass))
            for name, stack, stores, loads, registers in figures.findall(said)}
