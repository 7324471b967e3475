"""Programs for an H200, compiled on a machine without one by the compiler inside JAX's CUDA plugin."""
from functools import cache
import jax, numpy as np
from jax._src import compiler
from jax._src.lib import _jax
from jax.experimental import topologies

# What the compiler wants to know of a device: NVIDIA's figures in the text form of XLA's GpuTargetConfigProto
# (xla/stream_executor/device_description.proto). ACCELERATED_FEATURES makes compute capability 9.0 into sm_90a.
H200 = '''
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: 233472  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  l2_cache_size: 62914560  memory_bandwidth: 4800000000000  device_memory_size: 150000000000
}
'''

@cache
def h200(): return topologies.get_topology_desc(platform='cuda', topology='1x1x1', target_config=H200).devices[0]

def shape(dims, dtype, memory='device'):
    "An argument's shape, placed on the CPU: a device that is only compiled for has no memories and drops `memory`."
    place = jax.sharding.SingleDeviceSharding(jax.devices('cpu')[0], memory_kind=memory)
    return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

def lower_for_cuda(program, *shapes): return program.trace(*shapes).lower(lowering_platforms=('cuda',))

def compile_for_h200(lowered):
    "The executable, to be read, not run. `lowered.compile()` would compile for the CPU, hence JAX's internals."
    options = compiler.get_compile_options(1, 1, device_assignment=np.array([[0]]))
    return h200().client.compile(lowered.compiler_ir('stablehlo'), _jax.DeviceList((h200(),)), options)
