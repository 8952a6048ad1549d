"""Every number by its name: what it is, with its expression. The report prints those it uses.

``results/README.md`` holds the same lines; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Of an evaluation: fresh samples at temperature 1, one answer to each held-out prompt.
HELD_OUT: Mapping[str, str] = {
    "score": "mean over prompts of the verifier's score of one sampled answer; no score counts 0",
    "unscored": "share of answers without a score; in a rollout: rows that left for want of one",
    "length": "mean tokens of an answer, the end token included",
    "truncated": "share of answers cut at the length limit",
    "sampled_nll": "mean of -log p(answer): estimates the entropy of whole answers, in nats",
    "exact_score": "sum of p(answer) times its score over all answers, where they can be counted",
}
#: Of a rollout, before its updates.
ROLLOUT: Mapping[str, str] = {
    "reward": "mean score of the sampled answers: training prompts, the recipe's temperature",
    "reward_std": "their standard deviation, divisor N",
    "response_length": "mean tokens of a sampled answer, the end token included",
    "response_truncated": "share of sampled answers cut at the length limit",
    "zero_variance": "share of groups whose rewards are all equal: they carry no gradient",
    "kept": "share of rows that the filters keep",
    "batches": "batches sampled for one rollout",
    "advantage_abs": "mean |A| over tokens, as the surrogate sees it",
    "updates": "optimiser steps made on the rollout",
}
#: Of an update; tables and figures show the mean over a rollout's updates.
UPDATE: Mapping[str, str] = {
    "loss": "the value that was minimised: no measure of learning, never on an axis with a reward",
    "critic_loss": "sum over tokens of share times the critic's loss",
    "grad_norm": "global norm of the policy's gradient before clipping",
    "grad_norm_after": "min(grad_norm, max_grad_norm)",
    "grad_clipped": "1 where the gradient was scaled down; its mean is the share of clipped steps",
    "critic_grad_norm": "the same norm of a critic with a backbone of its own",
    "outside": "share of tokens with A != 0 whose ratio r lies strictly outside the recipe's "
    "interval, or outside [.8, 1.2] where it declares none",
    "flat": "share of tokens with A != 0 whose pull is exactly 0",
    "capped": "share of tokens with A != 0 beyond a declared bound, not flat, pull = bound times A",
    "no_advantage": "share of tokens with A = 0",
    "kl_old_k1": "mean of d = old_logp - logp: estimates KL(old || policy) per token, in nats",
    "kl_old_k2": "mean of d^2/2 of the same d: biased, never negative",
    "kl_old_k3": "mean of e^-d - 1 + d of the same d: unbiased, never negative",
    "kl_ref_k1": "mean of d = logp - ref_logp: estimates KL(policy || ref) per token, in nats",
    "kl_ref_k3": "mean of e^-d - 1 + d of the same d: never negative; far from the reference "
    "single tokens dominate it",
    "ratio_mean": "mean of r = exp(logp - old_logp) before any clip or cap",
    "ratio_min": "the least r",
    "ratio_max": "the largest r",
    "ratio_ess": "(sum r)^2 / (N sum r^2): effective sample size, as a share of the N tokens",
    "entropy": "mean per token of -sum p log p over the whole vocabulary, in nats",
    "value_clipped": "share of tokens with |V - V_old| > c",
    "explained_variance": "1 - Var(R - V)/Var(R) with the rollout's values",
    "return_mean": "mean of the critic's targets R",
    "return_std": "their standard deviation, divisor N",
    "value_mean": "mean of the rollout's values V",
}
#: Of a run's start and of one that raised.
START: Mapping[str, str] = {
    "steps": "supervised steps of the warm start",
    "accuracy": "held-out accuracy that ended the warm start",
    "crashed": "1 in the only line of a run that raised twice",
}
#: Suffixes of outside, flat and capped.
SIDES: Mapping[str, str] = {
    "_positive": "among tokens with A > 0",
    "_negative": "among tokens with A < 0",
}
#: Columns of the tables.
COLUMNS: Mapping[str, str] = {
    "recipe": "the algorithm, by its name in the study",
    "condition": "the setting under which every recipe ran",
    "seed": "of the run: recipes with one seed share start, prompts, first rollout",
    "run_key": "hash of all that can change the run's numbers",
    "status": "ok, diverged (a number was not finite) or crashed (raised twice)",
    "start": "score of the starting policy: first evaluation, mean over runs",
    "final": "mean score of the last E/10 of a run's E planned evaluations, rounded down, at least "
    "one, never the best; a failed run scores the floor at each that it did not reach",
    "normalised": "(final - s_ref) / (s_opt - s_ref): s_ref mean start over seeds, s_opt the best "
    "possible; 0 is the starting policy, 1 the best possible, not clipped",
    "gain": "final - start, within each run (of its seed): what training brought; mean over runs",
    "gain_low": "lower end of its 95 % t-interval over runs",
    "gain_high": "upper end of it",
    "evaluations": "E, planned",
    "at_floor": "those of them at which a failed run scores the floor",
    "updates": "optimiser steps of the run (among recorded numbers: of the rollout)",
    "generated_tokens": "response tokens sampled in training, mean over runs",
    "mean": "final score, mean over runs",
    "low": "lower end of the interval: mean - t s / sqrt(n), t of n - 1 degrees of freedom; "
    "none below 3 runs",
    "high": "upper end of it",
    "sd": "s, standard deviation over runs, divisor n - 1",
    "n": "runs, or pairs of runs with one seed",
    "failures": "runs that diverged or crashed; they are counted in everything",
    "verdicts": "what the verdicts of its condition say of the recipe",
    "best_by_verdict": "no verdict says that another recipe is better, and it is better than some "
    "other or ties with one of which the same is true; means decide nothing",
    "study": "hash of the study's declarations",
    "a": "the recipe that is asked about",
    "b": "the recipe that it is compared with",
    "difference": "mean over seeds of d = normalised score of a - that of b",
    "level": "nominal coverage of the interval, 1 - alpha; not adjusted for several contrasts",
    "p": "sign-flip test: share of sign patterns with |sum of +-d| >= |sum of d|",
    "p_adjusted": "p by Holm's method over the declared contrasts",
    "tost_p": "p of two one-sided t-tests that |mean difference| is at least the margin",
    "tost_adjusted": "the same by Holm's method",
    "rho": "correlation of the two recipes' scores over seeds: what pairing has bought",
    "d_z": "difference / standard deviation of d",
    "improvement": "probability that a run of a beats a run of b: share of all pairs, ties half",
    "shift": "median of all (d_i + d_j)/2, i <= j: Hodges-Lehmann",
    "verdict": "better, worse, equivalent, inconclusive, exploratory, or none",
    "note": "what qualifies the verdict, or keeps it from being said",
    "seeds_needed": "seeds that would usually decide, from the margin and the spread of d: never "
    "from the difference seen",
    "components": "the component in each slot",
    "weight_low": "lower bound of the weight interval: ratios below it are clipped or capped; "
    "none: no such bound",
    "weight_high": "upper bound of it",
    "update": "optimiser steps before the run ended",
    "cause": "component (or hook) and the statistic that ended the run",
    "failed": "how many of the arm's runs failed",
    "share": "failed / n, with Wilson's 95 % interval",
    "name": "what the value is of",
    "value": "the value",
}
#: The words of a verdict.
WORDS: Mapping[str, str] = {
    "better": "adjusted p <= alpha and the interval of the difference lies above 0",
    "worse": "adjusted p <= alpha and the interval of the difference lies below 0",
    "equivalent": "adjusted TOST p <= alpha: the difference is smaller than the margin either way",
    "inconclusive": "none of these can be said from these runs: neither a difference nor a tie",
    "exploratory": "not declared before the runs: an interval and no verdict",
}


def metrics() -> dict[str, str]:
    """Every recorded number, by name."""
    sided = {
        f"{name}{side}": f"{name} {among}"
        for name in ("outside", "flat", "capped")
        for side, among in SIDES.items()
    }
    return {**HELD_OUT, **ROLLOUT, **UPDATE, **sided, **START}
