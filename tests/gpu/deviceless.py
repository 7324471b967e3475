"""Programs for an H200 or an A100, compiled on a machine without one by the compiler inside JAX's CUDA plugin."""
import importlib.metadata
from contextlib import contextmanager
from functools import cache
import jax, numpy as np, pytest
from jax._src import compiler
from jax._src.lib import _jax
from jax.experimental import topologies
from lorajax.split import AXIS

# What the compiler wants to know of a device: NVIDIA's figures in the text form of XLA's GpuTargetConfigProto
# (xla/stream_executor/device_description.proto). ACCELERATED_FEATURES makes compute capability 9.0 into sm_90a.
COMMON = '''
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536  shared_memory_per_block: 49152
'''
DEVICES = {
    'sm_90a': ('NVIDIA H200', 132, '''
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  l2_cache_size: 62914560  memory_bandwidth: 4800000000000  device_memory_size: 150000000000
'''),
    'sm_80': ('NVIDIA A100', 108, '''
  cuda_compute_capability { major: 8 }
  core_count: 108  fpus_per_core: 64  clock_rate_ghz: 1.41
  shared_memory_per_core: 167936  shared_memory_per_block_optin: 166912
  l2_cache_size: 41943040  memory_bandwidth: 2039000000000  device_memory_size: 85000000000
''')}

def needs_plugin():
    "Skips what calls it where JAX's CUDA plugin is not installed."
    try: importlib.metadata.version('jax-cuda13-plugin')
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("JAX's CUDA plugin is not installed; make gpu-check installs it", allow_module_level=True)

@cache
def target_devices(n, arch='sm_90a'): # of one host
    name, _, facts = DEVICES[arch]
    config = f'gpu_device_info {{ name: "{name}" {COMMON}{facts} }}'
    return np.array(topologies.get_topology_desc(platform='cuda', topology=f'1x1x{n}', target_config=config).devices)

def named_mesh(n, arch='sm_90a'): # for a program of all of them: such devices don't know their own name
    name, cores, _ = DEVICES[arch]
    device = jax.sharding.AbstractDevice(name, cores, 'gpu')
    return jax.sharding.AbstractMesh((n,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)

@contextmanager
def as_gpu(arch='sm_90a'):
    "Inside, programs are traced and lowered as if this were the default device."
    name, cores, _ = DEVICES[arch]
    device = jax.sharding.AbstractDevice(name, cores, 'gpu')
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)): yield

def shape(dims, dtype, memory='device'):
    "An argument's shape, placed on the CPU: a device that is only compiled for has no memories and drops `memory`."
    place = jax.sharding.SingleDeviceSharding(jax.devices('cpu')[0], memory_kind=memory)
    return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

def lower_for_cuda(program, *shapes, arch='sm_90a'):
    with as_gpu(arch): return program.trace(*shapes).lower(lowering_platforms=('cuda',))

def compile_for_gpu(lowered, arch='sm_90a', n=1, **flags): # n: devices, in the axis of the program's mesh
    "The executable, to be read, not run. `lowered.compile()` would compile for the CPU, hence JAX's internals."
    options = compiler.get_compile_options(1, n, device_assignment=np.arange(n)[None], env_options_overrides=flags)
    devices = target_devices(n, arch)
    return devices[0].client.compile(lowered.compiler_ir('stablehlo'), _jax.DeviceList(tuple(devices)), options)
