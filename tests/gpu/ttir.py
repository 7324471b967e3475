"""Triton IR run in numpy: what Pallas really hands to the GPU's compiler, one program of the grid after another.

Interpret mode runs a kernel's jaxpr and can't see a mistake in its lowering. This runs what was lowered, and is stricter than
a GPU: a lane that is not masked off must stay inside its buffer, nobody may read what nobody has written, and no two
programs may write one element or read what another has written. It knows JAX's internals: the Triton dialect's bindings
and the custom call's `backend_config`.
"""
import itertools, operator, re
from dataclasses import dataclass
import jax, ml_dtypes, numpy as np
from jax._src.lib import triton as _bindings # noqa: F401 (registers the extension module that the next line imports)
from jax._src.lib.mlir import ir
from jaxlib.triton import dialect

DTYPES = dict(i1=np.bool_, i8=np.int8, i16=np.int16, i32=np.int32, i64=np.int64, f16=np.float16,
              bf16=ml_dtypes.bfloat16, f32=np.float32, f64=np.float64)

class Fault(AssertionError):
    "What a GPU would do without a word."

# Buffers

@dataclass
class Buffer:
    "A kernel's operand or result, flat."
    name: str
    data: np.ndarray
    known: np.ndarray # which elements hold something
    writer: np.ndarray # program that wrote each element, -1 for none

    @staticmethod
    def given(name, array, written): # written: whether a result starts as this; if not, nothing is copied, however large
        flat = (np.array if written else np.asarray)(array).reshape(-1)
        every = lambda x: np.full(flat.size, x) if written else np.broadcast_to(x, flat.size)
        return Buffer(name, flat, every(True), every(-1))

    @staticmethod
    def empty(name, shape, dtype):
        n = int(np.prod(shape))
        return Buffer(name, np.zeros(n, dtype), np.zeros(n, bool), np.full(n, -1))

@dataclass
class Pointer:
    buffer: Buffer
    at: np.ndarray # offsets, in elements
    def map(self, f): return Pointer(self.buffer, f(self.at))

def lanes(pointer, mask, program, verb):
    "Offsets and a mask of one shape; faults if a live lane is outside the buffer."
    at, size = np.asarray(pointer.at), pointer.buffer.data.size
    live = np.ones(at.shape, bool) if mask is None else np.broadcast_to(mask, at.shape)
    if (out := live & ((at < 0) | (at >= size))).any():
        raise Fault(f'{verb} at {at[out].flat[0]} of {pointer.buffer.name}, which has {size} elements, by program {program}')
    return np.where(live, at, 0), live

def load(pointer, mask, other, program):
    b, (at, live) = pointer.buffer, lanes(pointer, mask, program, 'load')
    if not (b.known[at] | ~live).all(): raise Fault(f'program {program} reads what nobody wrote in {b.name}')
    if (live & (b.writer[at] >= 0) & (b.writer[at] != program)).any():
        raise Fault(f'program {program} reads what another one wrote in {b.name}')
    if other is None: other = np.array(-1, np.int64).astype(b.data.dtype) if b.data.dtype.kind in 'iub' else np.nan
    return np.where(live, b.data[at] if b.data.size else 0, other).astype(b.data.dtype)

def store(pointer, value, mask, program):
    b, (at, live) = pointer.buffer, lanes(pointer, mask, program, 'store')
    at, value = at[live], np.broadcast_to(value, live.shape)[live]
    if ((b.writer[at] >= 0) & (b.writer[at] != program)).any(): raise Fault(f'two programs write one element of {b.name}')
    if np.unique(at).size != at.size: raise Fault(f'program {program} writes an element of {b.name} twice at once')
    b.data[at], b.known[at], b.writer[at] = value, True, program

# Operations. Each factory takes an op and returns a function of (machine, operands) that gives one result.

def shape_of(type): return tuple(type.shape) if isinstance(type, ir.RankedTensorType) else ()
def dtype_of(type): return np.dtype(DTYPES[str(type.element_type if isinstance(type, ir.RankedTensorType) else type)])
def result(op): return op.results[0].type
def number(op, name): return ir.IntegerAttr(op.attributes[name]).value
def unsigned(x): return x.view(f'u{x.dtype.itemsize}') if x.dtype.kind == 'i' else x.astype(np.uint8)
def on_unsigned(f): return lambda a, b: f(unsigned(a), unsigned(b))
def ordered(f): return lambda a, b: f(a, b) & ~np.isnan(a) & ~np.isnan(b)
def unordered(f): return lambda a, b: f(a, b) | np.isnan(a) | np.isnan(b)
def toward_zero(a, b):
    a64, b64 = a.astype(np.int64), b.astype(np.int64)
    return (np.abs(a64) // np.abs(b64) * np.sign(a64) * np.sign(b64)).astype(a.dtype)

BINARY = {'arith.addi': np.add, 'arith.addf': np.add, 'arith.subi': np.subtract, 'arith.subf': np.subtract,
          'arith.muli': np.multiply, 'arith.mulf': np.multiply, 'arith.divf': np.divide, 'arith.divsi': toward_zero,
          'arith.remsi': np.fmod, 'arith.divui': on_unsigned(np.floor_divide), 'arith.remui': on_unsigned(np.remainder),
          'arith.andi': np.bitwise_and, 'arith.ori': np.bitwise_or, 'arith.xori': np.bitwise_xor,
          'arith.shli': np.left_shift, 'arith.shrsi': np.right_shift, 'arith.shrui': on_unsigned(np.right_shift),
          'arith.maxsi': np.maximum, 'arith.minsi': np.minimum, 'arith.maxui': on_unsigned(np.maximum),
          'arith.minui': on_unsigned(np.minimum), 'arith.maximumf': np.maximum, 'arith.minimumf': np.minimum,
          'arith.maxnumf': np.fmax, 'arith.minnumf': np.fmin, 'math.powf': np.power}
UNARY = {'math.exp': np.exp, 'math.exp2': np.exp2, 'math.log': np.log, 'math.log2': np.log2, 'math.sqrt': np.sqrt,
         'math.rsqrt': lambda x: 1 / np.sqrt(x), 'math.tanh': np.tanh, 'math.absf': np.abs, 'math.absi': np.abs,
         'math.sin': np.sin, 'math.cos': np.cos, 'math.floor': np.floor, 'math.ceil': np.ceil, 'arith.negf': np.negative}
CASTS = ('arith.extf', 'arith.truncf', 'arith.sitofp', 'arith.uitofp', 'arith.fptosi', 'arith.extsi', 'arith.extui',
         'arith.trunci', 'tt.fp_to_fp')
SIGNED = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
COMPARE_INTS = SIGNED + [on_unsigned(f) for f in SIGNED[2:]] # in the order of arith.CmpIPredicate
COMPARE = [operator.eq, operator.gt, operator.ge, operator.lt, operator.le, operator.ne]
COMPARE_FLOATS = ([lambda a, b: np.zeros_like(a, bool)] + [ordered(f) for f in COMPARE] +
                  [lambda a, b: ~np.isnan(a) & ~np.isnan(b), lambda a, b: np.isnan(a) | np.isnan(b)] +
                  [unordered(f) for f in COMPARE]) # arith.CmpFPredicate
EMIT = {}

def emits(*names):
    def add(factory):
        for n in names: EMIT[n] = factory
        return factory
    return add

@emits(*BINARY)
def binary(op):
    f, dtype = BINARY[op.name], dtype_of(result(op))
    def run(m, a, b):
        y = np.asarray(f(a, b))
        return y.view(dtype) if y.dtype.kind == 'u' and dtype.kind == 'i' and y.itemsize == dtype.itemsize else y.astype(dtype)
    return run

@emits(*UNARY)
def unary(op):
    f, dtype = UNARY[op.name], dtype_of(result(op))
    return lambda m, a: f(a if a.dtype.kind == 'i' else a.astype(np.float32)).astype(dtype)

@emits(*CASTS)
def cast(op):
    dtype, name = dtype_of(result(op)), op.name
    def run(m, a):
        if name in ('arith.extui', 'arith.uitofp'): a = unsigned(a)
        elif a.dtype == bool: a = -a.astype(np.int8) # i1 true is -1
        return a.astype(dtype) if dtype != bool else (a.astype(np.int64) & 1).astype(bool)
    return run

@emits('tt.bitcast', 'arith.bitcast')
def bitcast(op):
    if isinstance(result(op), dialect.PointerType) or 'ptr' in str(result(op)): return lambda m, a: a
    dtype = dtype_of(result(op))
    return lambda m, a: np.ascontiguousarray(a).view(dtype).reshape(np.shape(a))

@emits('arith.constant')
def constant(op):
    value, (shape, dtype) = op.attributes['value'], (shape_of(result(op)), dtype_of(result(op)))
    if isinstance(value, ir.DenseElementsAttr):
        assert value.is_splat, 'Triton IR from Pallas has only constants of one number'
        value = value.get_splat_value()
    full = np.full(shape, ir.IntegerAttr(value).value if isinstance(value, ir.IntegerAttr) else value.value, dtype)
    return lambda m: full

LIBDEVICE = {'__nv_expf': np.exp}

@emits('tt.extern_elementwise')
def extern(op):
    f, dtype = LIBDEVICE[ir.StringAttr(op.attributes['symbol']).value], dtype_of(result(op))
    return lambda m, *xs: f(*xs).astype(dtype)

@emits('arith.cmpi', 'arith.cmpf')
def compare(op):
    f = (COMPARE_INTS if op.name == 'arith.cmpi' else COMPARE_FLOATS)[number(op, 'predicate')]
    return lambda m, a, b: np.asarray(f(a, b))

@emits('arith.select')
def select(op):
    def run(m, which, a, b):
        if not isinstance(a, Pointer): return np.where(which, a, b).astype(a.dtype)
        assert a.buffer is b.buffer, 'a choice between two buffers'
        return Pointer(a.buffer, np.where(which, a.at, b.at))
    return run

@emits('tt.get_program_id')
def program_id(op):
    axis = number(op, 'axis')
    return lambda m: np.int32(m.place[axis])

@emits('tt.get_num_programs')
def num_programs(op):
    axis = number(op, 'axis')
    return lambda m: np.int32(m.grid[axis])

@emits('tt.make_range')
def make_range(op):
    row = np.arange(number(op, 'start'), number(op, 'end'), dtype=np.int32)
    return lambda m: row

def shaped(f): # a change of shape works on a pointer's offsets too
    return lambda m, a: a.map(f) if isinstance(a, Pointer) else f(np.asarray(a))

@emits('tt.splat', 'tt.broadcast')
def broadcast(op):
    shape = shape_of(result(op))
    return shaped(lambda a: np.broadcast_to(a, shape))

@emits('tt.expand_dims')
def expand_dims(op):
    axis = number(op, 'axis')
    return shaped(lambda a: np.expand_dims(a, axis))

@emits('tt.reshape')
def reshape(op):
    shape = shape_of(result(op))
    return shaped(lambda a: a.reshape(shape))

@emits('tt.trans')
def transpose(op):
    order = list(ir.DenseI32ArrayAttr(op.attributes['order']))
    return shaped(lambda a: a.transpose(order))

@emits('tt.addptr')
def addptr(op): return lambda m, p, n: p.map(lambda at: at + n.astype(np.int64))

@emits('tt.load')
def load_op(op):
    dtype = dtype_of(result(op)) # the IR's integers have no sign, and its pointer to a bool is one to an i8
    def run(m, p, mask=None, other=None):
        if other is not None: other = np.asarray(other).view(p.buffer.data.dtype)
        return load(p, mask, other, m.program).view(dtype)
    return run

@emits('tt.store')
def store_op(op):
    return lambda m, p, value, mask=None: store(p, np.asarray(value).view(p.buffer.data.dtype), mask, m.program)

@emits('tt.dot')
def dot(op):
    dtype = dtype_of(result(op))
    wide = np.int32 if dtype.kind == 'i' else np.float32
    return lambda m, a, b, c: (a.astype(wide) @ b.astype(wide) + c).astype(dtype)

@emits('tt.reduce')
def reduce(op):
    axis, combine = number(op, 'axis'), Block(op.regions[0].blocks[0])
    def run(m, *xs):
        parts = [np.moveaxis(x, axis, 0) for x in xs]
        while len(parts[0]) > 1: # halves, as a tree of lanes would
            half = len(parts[0]) // 2
            parts = combine(m, *(p[:half] for p in parts), *(p[half:] for p in parts))
        return tuple(p[0] for p in parts)
    return run

@emits('scf.for')
def scf_for(op):
    body = Block(op.regions[0].blocks[0])
    def run(m, start, stop, step, *carry):
        for i in range(int(start), int(stop), int(step)): carry = body(m, start.dtype.type(i), *carry)
        return tuple(carry)
    return run

@emits('scf.while')
def scf_while(op):
    before, after = (Block(r.blocks[0]) for r in op.regions)
    def run(m, *carry):
        while True:
            go, *carry = before(m, *carry)
            if not go: return tuple(carry)
            carry = after(m, *carry)
    return run

@emits('scf.if')
def scf_if(op):
    branches = [Block(r.blocks[0]) if len(r.blocks) else lambda m: () for r in op.regions]
    return lambda m, which: tuple(branches[0 if which else 1](m))

NUMBERS = {} # a value of the module that is being read -> its register

def register(values): return [NUMBERS.setdefault(v, len(NUMBERS)) for v in values]

class Block:
    "A basic block as a list of steps over the machine's registers; called, it gives its terminator's operands."
    ends = ('scf.yield', 'scf.condition', 'tt.return', 'tt.reduce.return')
    def __init__(self, block):
        self.arguments, self.steps, self.returns = register(block.arguments), [], []
        for op in block.operations:
            op = op.operation
            if op.name == 'tt.load' and not any(op.results[0].uses): continue # a swap's old value, which nobody wants
            if op.name in self.ends: self.returns = register(op.operands)
            elif op.name in EMIT: self.steps.append((EMIT[op.name](op), register(op.operands), register(op.results)))
            else: raise NotImplementedError(f'{op.name} is not among the Triton operations that this file runs')

    def __call__(self, m, *arguments):
        registers = m.registers
        for name, value in zip(self.arguments, arguments, strict=True): registers[name] = value
        for step, operands, results in self.steps:
            got = step(m, *[registers[o] for o in operands])
            for name, value in zip(results, got if isinstance(got, tuple) else (got,)): registers[name] = value
        return [registers[o] for o in self.returns]

class Machine:
    "One program of the grid."
    def __init__(self, program, place, grid): self.program, self.place, self.grid, self.registers = program, place, grid, {}

# From a Pallas call to its results

@dataclass(frozen=True)
class TritonCall:
    "One lowered `pallas_call`."
    name: str
    code: bytes
    grid: tuple[int, ...]
    aliases: dict[int, int] # operand -> result that starts as it

def triton_calls(lowered):
    "The Triton calls in a lowered program."
    found = []
    def visit(op):
        if op.name == 'stablehlo.custom_call' and 'triton' in str(op.attributes['call_target_name']):
            config = ir.DictAttr(op.attributes['mhlo.backend_config'])
            grid = tuple(ir.IntegerAttr(config[f'grid_{axis}']).value for axis in 'xyz')
            pairs = [re.findall(r'(?:operand_index = |output_tuple_indices = \[)(\d+)', str(a))
                     for a in op.attributes['output_operand_aliases']] if 'output_operand_aliases' in op.attributes else []
            aliases = {int(p[-1]): int(p[0]) if len(p) == 2 else 0 for p in pairs}
            name = ir.StringAttr(config['name']).value
            found.append(TritonCall(name, ir.StringAttr(config['ir']).value_bytes, grid, aliases))
        return ir.WalkResult.ADVANCE
    lowered.compiler_ir('stablehlo').operation.walk(visit)
    return found

def run_call(
    call:TritonCall,
    operands, # numpy arrays
    results, # ShapeDtypeStructs
) -> list[np.ndarray]:
    "The call's results."
    given = [Buffer.given(f'{call.name}, operand {i}', x, i in call.aliases) for i,x in enumerate(operands)]
    made = [Buffer.empty(f'{call.name}, result {i}', r.shape, r.dtype) for i,r in enumerate(results)]
    for operand, to in call.aliases.items(): made[to] = given[operand]
    with ir.Context() as context:
        dialect.register_dialect(context)
        context.load_all_available_dialects()
        module = ir.Module.parse(call.code)
        NUMBERS.clear()
        main = Block(module.body.operations[0].operation.regions[0].blocks[0])
        pointers = [Pointer(b, np.int64(0)) for b in given + made]
        with np.errstate(all='ignore'): # as a GPU does
            for program, place in enumerate(itertools.product(*map(range, call.grid))):
                main(Machine(program, place, call.grid), *pointers)
    for b in made:
        if not b.known.all(): b.data[~b.known] = np.array(np.nan if b.data.dtype.kind not in 'iub' else 77, b.data.dtype)
    return [b.data.reshape(r.shape).astype(r.dtype) for b,r in zip(made, results)]
