"""The command `lorajax serve`."""
from __future__ import annotations
import logging, os, socket, sys
from dataclasses import replace
from typing import Annotated
import typer
from rich.console import Console
from rich.progress import track
from lorajax.base import base_config
from lorajax.core import Refused, needs
from lorajax.hosts import join_hosts
from lorajax.split import share, split_over
from .settings import Settings, check, from_environment

D = Settings()
RAY = dict(RAY_USAGE_STATS_ENABLED='0', # no reports to its makers
           RAY_DEDUP_LOGS='0', # each request has its line
           RAY_SERVE_THROUGHPUT_OPTIMIZED='1', # replicas talk by gRPC, without detours through Ray's object store
           RAY_SERVE_ENABLE_DIRECT_INGRESS='0') # clusters keep Serve's proxies, or each stop takes half a minute

def opt(help:str, default=None, flag:str|None=None):
    said = f'{help} [{default}]' if default not in (None, '') else help
    return typer.Option(*([flag] if flag else []), help=said, show_default=False)

def url_of(host:str, port:int) -> str: return f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'
def family_of(host:str) -> int: return socket.AF_INET6 if ':' in host else socket.AF_INET
def taken(host:str, port:int, e:Exception) -> Refused:
    why = getattr(e, 'strerror', None) or e
    return Refused(f'{host}:{port} cannot be listened on ({str(why).partition(" (")[0]}); choose another --host or --port')

def check_free(host:str, port:int):
    "Refuses an address that another program has, before minutes are spent on loading."
    try:
        with socket.create_server((host, port), family=family_of(host)): pass
    except (OSError, OverflowError) as e: raise taken(host, port, e) from None

def serve(
    model:Annotated[str|None, opt(
        'The base: a Hugging Face directory, a .gguf file, a directory from `lorajax convert`, or smollm2.', D.model)]=None,
    adapters:Annotated[str|None, opt(
        'A directory of adapter directories: all are loaded, and more may be loaded from it at run time.', D.adapters)]=None,
    host:Annotated[str, opt('Where to listen; 0.0.0.0 for every network.', '127.0.0.1')]='127.0.0.1',
    port:Annotated[int, opt('', 8000)]=8000,
    state:Annotated[str|None, opt('A directory for what survives restarts.', D.state)]=None,
    router:Annotated[str|None, opt('A directory from `lorajax route train`, which answers the model `auto`.')]=None,
    redis:Annotated[str|None, opt('URL of a Redis that several servers share.')]=None,
    dtype:Annotated[str|None, opt('Of weights and activations: bfloat16 or float32.')]=None,
    rows:Annotated[int|None, opt('Sequences that generate at the same time.', D.rows)]=None,
    slots:Annotated[int|None, opt('Different adapters among them.', D.slots)]=None,
    max_rank:Annotated[int|None, opt('Largest rank of an adapter.', D.max_rank)]=None,
    max_len:Annotated[int|None, opt('Positions of a sequence.', D.max_len)]=None,
    tp:Annotated[int|None, opt('Devices that share the base, each with a part of every layer.', D.tp)]=None,
    hosts:Annotated[bool|None, opt(
        'This process is one of several that share the base; see serving/README.md.', flag='--hosts')]=None,
    memory:Annotated[int|None, opt('Bytes of memory for keys, values and adapters, on each device.')]=None,
    queue:Annotated[int|None, opt('Sequences that may wait before requests are turned away.', D.queue)]=None,
    api_keys:Annotated[str|None, opt('A JSON file of API keys; see serving/README.md.')]=None,
    strict:Annotated[bool|None, opt(
        'An adapter that cannot be served is an error; otherwise the base answers and says so.', flag='--strict')]=None,
    cache:Annotated[float|None, opt('Least similarity of prompts that get one answer, such as 0.97; 0 for none.', D.cache)]=None,
    ray:Annotated[bool, opt('Engines as replicas on Ray Serve: at RAY_ADDRESS, or on this machine.', flag='--ray')]=False,
    replicas:Annotated[int|None, opt('Engines; more than one needs --ray.', D.replicas)]=None,
    most_replicas:Annotated[int|None, opt('Engines that Ray may come to run while requests wait.')]=None,
    log_level:Annotated[str|None, opt('Of the log on standard error: debug, info, warning or error.', D.log_level)]=None,
):
    """Serve a base and its adapters with the API of OpenAI.

    Every setting may also be given as an environment variable: LORAJAX_MODEL and so on; serving/README.md lists them all.
    """
    given = dict(model=model, adapters=adapters, state=state, router=router, redis=redis, dtype=dtype, rows=rows, slots=slots,
                 max_rank=max_rank, max_len=max_len, tp=tp, hosts=hosts, memory=memory, queue=queue, api_keys=api_keys,
                 strict=strict, cache=cache, replicas=replicas, most_replicas=most_replicas, log_level=log_level)
    settings = replace(from_environment(), **{k: v for k,v in given.items() if v is not None})
    if not ray and max(settings.replicas, settings.most_replicas) > 1:
        raise Refused(f'replicas={settings.replicas}, most_replicas={settings.most_replicas}; for more than one add --ray')
    uvicorn, app = needs('uvicorn', 'serve'), needs('serving.app', 'serve')
    check(replace(settings, adapters='', roots='') if settings.hosts else settings) # which the first host has
    app.set_up_logs(settings.log_level)
    if not (ray and os.environ.get('RAY_ADDRESS')): # there the base may be on other machines alone
        share(base_config(settings.model), settings.tp) # refuses one that isn't there, or can't be shared
    if ray:
        if settings.hosts: raise Refused('--ray and --hosts do not go together; a replica is one process')
        check_free(host, port)
        for name, value in RAY.items(): os.environ.setdefault(name, value) # read when Ray is imported, and by its processes
        return needs('serving.ray', 'ray').run(settings, host, port)
    err = Console(stderr=True)
    def bar(shapes): return track(shapes, 'compiling', console=err, transient=True) if err.is_terminal else shapes
    if settings.hosts and (number := join_hosts()):
        print(f'lorajax: this is host {number}, which follows host 0', file=sys.stderr)
        return app.follow_first(settings, bar)
    check_free(host, port)
    if settings.tp > 1: split_over(settings.tp) # refuses more devices than there are
    made = app.create_app(settings, bar)
    print(f'lorajax: loading {settings.model}; the first start also compiles, which takes a minute or two', file=sys.stderr)
    def ready(app):
        print(f'lorajax: {url_of(host, port)} answers (Ctrl-C stops); {", ".join(app.state.service.stats.ran)}', file=sys.stderr)
    made.on_startup.append(ready)
    # A refusal is said in one sentence, below, and not with uvicorn's traceback.
    logging.getLogger('uvicorn.error').addFilter(lambda record: not made.state.get('refused'))
    try:
        uvicorn.run(made, host=host, port=port, log_config=None, access_log=False, server_header=False,
                    timeout_graceful_shutdown=30)
    except SystemExit:
        if refused := made.state.get('refused'): raise Refused(refused) from None
        raise

def run(arguments:list[str]):
    "The command with these words behind it."
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(serve)
    app(arguments, prog_name='lorajax serve')
