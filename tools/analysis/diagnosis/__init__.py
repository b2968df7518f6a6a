"""In: files of a job that hangs or diverges. Out: which rank, which group, which call.

From Python:

    from crossrank.tools.analysis.diagnosis.diagnose import diagnose
    from crossrank.tools.analysis.diagnosis.evidence import find_candidates, read_evidence
    from crossrank.tools.parallel import Fleet

    diagnosis, job = diagnose(read_evidence(find_candidates(["/data/run1"]), Fleet(jobs=4)))

Read `diagnose` first, which names all steps: `evidence` reads files; `job_state` is how far ranks came (with
`main_threads`, where their hosts were); `mismatches` and `p2p` compare their calls; `wait_for_graph` finds what each
rank is stuck in; `root_causes` and `absent_ranks` (with `call_history` and `stacks`) tell causes from what follows;
`stragglers` measures who is late. `findings` comes out.
"""
