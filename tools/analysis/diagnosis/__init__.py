"""Which rank, which group, which call: the diagnosis of a hung or diverging job.

From Python:

    from crossrank.tools.analysis.diagnosis.diagnose import diagnose
    from crossrank.tools.analysis.diagnosis.inputs import find_candidates, read_evidence
    from crossrank.tools.parallel import Fleet

    diagnosis, job = diagnose(read_evidence(find_candidates(["/data/run1"]), Fleet(jobs=4)))

In the order in which they work: `inputs` finds files and has them read (`from_flight`, `from_comms`) into `evidence`;
`job` puts the ranks side by side; `collectives` and `p2p` match their calls; `waiting` finds what each rank is stuck
in; `causes` (with `deadlocks`, `absences`, `consequences`, `habits`) tells root causes from what follows;
`stragglers` measures who is late. `findings` is what comes out; `tools.output.diagnosis` shows it.
"""
