"How fast this machine's memory is: the bound that all others stand beside."
from quiet import bandwidth, figure, take_turns

def memory(budget, options):
    runs = take_turns({'memory': bandwidth}, budget)['memory']
    notes = dict(read='XLA sums 0.5 GB', copy='NumPy, a thread a core; read plus written')
    return [figure('memory', k, 'GB/s', runs, lambda r: r[k] / 1e9, note) for k, note in notes.items()]
