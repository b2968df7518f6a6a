"""In: files of a job that hangs or diverges. Out: which rank, which group, which call.

From Python:

    from crossrank.tools.analysis.diagnosis.diagnose import diagnose
    from crossrank.tools.analysis.diagnosis.evidence import find_candidates, read_evidence
    from crossrank.tools.parallel import Fleet

    diagnosis, job = diagnose(read_evidence(find_candidates(["/data/run1"]), Fleet(jobs=4)))

Read `diagnose` first, which names all steps: `evidence` reads files; `job_state` is how far ranks came, `states` what
they did when they were asked, and `main_threads` where their hosts were; `mismatches` and `p2p` compare their calls;
`wait_for_graph` finds what each rank is stuck in. A `search` tells causes from what follows: `unequal_calls`,
`root_causes`, `absent_ranks` and `outside_calls` (with `call_history` and `stacks`). `stragglers` measures who is late.
`findings` comes out.
"""
