"""The engine: one step is schedule, propose, forward, verify, commit, observe."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from operator import sub

import numpy as np
from numpy.typing import NDArray

from outrider.cache.blocks import BlockManager
from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.rng import choice_seed, fresh_seed
from outrider.core.types import FinishReason, Sequence, Span, SpanRecord, StepRecord, StepTimes, Verdict
from outrider.engine.answer import Answer
from outrider.engine.commit import Outcome, append_tokens, commit_step
from outrider.engine.drafters import Drafters
from outrider.engine.metrics import EngineMetrics
from outrider.engine.request import Delta, Limits, Request, RequestOutput, check_request, with_prediction
from outrider.engine.scheduler import Plan, Scheduler
from outrider.models.detokenizer import Detokenizer
from outrider.models.load import LoadedModel
from outrider.ops.native import default_threads
from outrider.runtime.memory import device_memory, plan_memory
from outrider.runtime.pool import KVPool, pick_kv_dtype
from outrider.runtime.runner import Runner, logit_parts
from outrider.sampling.grammar import Account, Masks
from outrider.sampling.rows import NodeRows, pruned
from outrider.sampling.sampler import Sampler
from outrider.spec.controller import DraftController, FixedLength
from outrider.spec.draws import draws_for
from outrider.spec.proposer import Proposer
from outrider.spec.verify import verify, verify_greedy


class Engine:
    """Continuous batching with speculation over one target. Not thread-safe: one thread calls it.

    ``proposers`` are the drafters by name; the first one serves requests that name none.
    """

    def __init__(
        self,
        target: LoadedModel,
        config: EngineConfig,
        proposers: Mapping[str, Proposer],
        spec: SpecConfig,
        controller: DraftController | None = None,
    ) -> None:
        self.target = target
        self.config = config
        self.spec = spec
        decoder, shape = target.decoder, target.config
        max_len = min(config.max_model_len or shape.max_position, shape.max_position)
        needs = [proposer.needs for proposer in proposers.values()]
        self.memory = plan_memory(
            config,
            decoder.weight_bytes,
            KVPool.bytes_per_token(shape, pick_kv_dtype(config.kv_cache_dtype, decoder.kv_dtype)),
            sum(n.weight_bytes for n in needs),
            sum(n.kv_bytes_per_token for n in needs),
            max_len,
            device_memory(decoder.device),
        )
        self.limits = Limits(max_len, self.memory.tokens, target.n_tokens)
        self.blocks = BlockManager(self.memory.n_blocks, config.block_size, config.enable_prefix_caching)
        self.runner = Runner(decoder, self.memory.n_blocks, config.block_size, config.kv_cache_dtype)
        self.metrics = EngineMetrics()
        self._masks = Masks(config.threads or default_threads())
        self._requests: dict[int, Request] = {}  # unfinished ones
        self._request_of: dict[int, Request] = {}  # by the id of a sequence that has not ended
        self._answer_of: dict[int, Answer] = {}
        self._drafters = Drafters(self.limits.vocab_size, self._request_of, self.metrics)
        for name, proposer in proposers.items():
            self.put_drafter(name, proposer)
        self._feature_layers = self._drafters.feature_layers
        controller = controller or FixedLength(0 if spec.speculation == "off" else spec.num_speculative_tokens)
        limits = config.max_num_seqs, config.max_num_batched_tokens
        self.scheduler = Scheduler(self.blocks, controller, *limits, on_admit=self._admitted)
        self._next_request = 0
        self._next_sequence = 0
        self._in_step = False
        self._aborts: list[int] = []

    def put_drafter(self, name: str, proposer: Proposer) -> None:
        """Adds a drafter, or puts it in another's place; not while a request is served. The memory plan stays."""
        kv = self.runner.pool.layers
        self._drafters.put(name, proposer, self.blocks, self.config.max_num_batched_tokens, kv)

    @property
    def proposers(self) -> dict[str, Proposer]:
        """The drafters by name; the first one serves requests that name none."""
        return self._drafters.proposers

    @property
    def controller(self) -> DraftController:
        """Who decides the draft lengths; another one may take over between two steps."""
        return self.scheduler.controller

    @controller.setter
    def controller(self, controller: DraftController) -> None:
        self.scheduler.controller = controller

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def prompts_wait(self) -> bool:
        """Whether any sequence has a prompt to compute: the next step may be a long one."""
        return self.scheduler.prompts_wait

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [answer.seq for answer in self._answer_of.values()]

    def add_request(
        self, prompt_ids: Seq[int], params: SamplingParams | None = None, spec: SpecParams | None = None
    ) -> Request:
        """Queues a request. Raises SettingError if it can never be served as asked.

        Unless it names its drafter it is given one with its first rows: one that never runs tells nothing of drafters.
        """
        params, spec = params or SamplingParams(), spec or SpecParams()
        check_request(prompt_ids, params, self.limits)
        spec = with_prediction(spec, self.target)
        if params.stop and self.target.tokenizer is None:
            raise SettingError("stop strings need a tokenizer; this model was loaded without one")
        self._drafters.candidates(spec)
        sampler = Sampler.of(params, self.target)
        request = Request(self._next_request, tuple(prompt_ids), "", [], time.perf_counter())
        self._next_request += 1
        self._requests[request.id] = request
        seed = fresh_seed() if params.seed is None else params.seed
        eos_ids, account = self.target.config.eos_ids, Account()
        for index in range(params.n):
            seq = Sequence(
                id=self._next_sequence,
                tokens=list(prompt_ids),
                n_prompt=len(prompt_ids),
                params=params,
                spec=spec,
                seed=choice_seed(seed, index),
                fork_of=request.answers[0].seq if index else None,
                max_len=min(len(prompt_ids) + params.max_tokens, self.limits.max_model_len, self.limits.pool_tokens),
            )
            self._next_sequence += 1
            answer = Answer(seq, sampler, self._detokenizer(params), eos_ids, account)
            request.answers.append(answer)
            self._request_of[seq.id], self._answer_of[seq.id] = request, answer
            self.scheduler.add(seq)
        if spec.drafter or not spec.enabled:
            self._drafters.assign(request, self.controller)
        return request

    def abort(self, request_id: int) -> None:
        """Ends a request and frees its blocks; one that is unknown or has ended is left alone.

        Called from within a step (by a logits processor, say) it takes effect when the step is over.
        """
        if self._in_step:
            self._aborts.append(request_id)
            return
        self._abort(request_id)

    def step(self) -> list[Delta]:
        """One pass over what is scheduled; returns what each answer gained."""
        self._in_step = True
        try:
            deltas = self._step()
        except BaseException:  # an interrupt, or a fault of a drafter
            self._recover()
            raise
        finally:
            self._in_step = False
        while self._aborts:
            deltas += self._abort(self._aborts.pop())
        return deltas

    def run(self, request: Request) -> RequestOutput:
        """Steps until ``request`` has ended."""
        while request.finished is None:
            self.step()
        return RequestOutput.of(request)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the block accounting is right; for tests, after any step."""
        self.blocks.check_integrity(self.sequences)

    def _step(self) -> list[Delta]:
        clock = [time.perf_counter()]
        plan = self.scheduler.schedule()
        self.metrics.preemptions += len(plan.preempted)
        for seq in plan.preempted:
            self._drafters.release(seq)
        if not plan.spans:
            return []
        for span in plan.spans:
            answer = self._answer_of[span.seq.id]
            if answer.began is None:
                self.metrics.began(self._request_of[span.seq.id], answer, clock[0])
        if plan.copies:
            self.runner.copy_blocks(plan.copies)
            self._drafters.copy_blocks(plan.copies)
        clock.append(time.perf_counter())
        draft_seconds = self._propose(plan.spans)
        clock.append(time.perf_counter())
        out = self.runner.forward(plan.spans, self._feature_layers)
        parts = logit_parts(plan.spans)
        logits = [out.logits[part] for part in parts]
        best = [None if out.best is None else out.best[part] for part in parts]
        clock.append(time.perf_counter())
        self._prepare_masks(plan.spans)
        verdicts = list(map(self._verify, plan.spans, logits, best))
        clock.append(time.perf_counter())
        outcomes = list(map(self._append, plan.spans, verdicts, logits))
        commits = commit_step(outcomes, self.runner, self.blocks, out.features)
        self._drafters.observe(commits, self._feature_layers)
        records = tuple(map(self._span_record, outcomes))
        deltas = [self._settle(o.span.seq) for o in outcomes if o.new_tokens or o.finish is not None]
        clock.append(time.perf_counter())
        record = self._record(plan, records, clock, draft_seconds)
        self.controller.observe(record)
        self.metrics.observe(record)
        return deltas

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        """Turns one answer's tokens into text that continues the prompt: a leading space is part of it."""
        if self.target.tokenizer is None:
            return None
        return Detokenizer(self.target.tokenizer, params.skip_special_tokens, strip_leading_space=False)

    def _abort(self, request_id: int) -> list[Delta]:
        """Ends a request, unless it has ended; returns what its answers still gained."""
        request = self._requests.get(request_id)
        deltas: list[Delta] = []
        for answer in () if request is None else request.answers:
            if answer.seq.id in self._answer_of:
                if answer.finish is None:
                    answer.end(FinishReason.ABORT)
                deltas.append(self._settle(answer.seq))
        return deltas

    def _admitted(self, seq: Sequence) -> None:
        self._drafters.assign(self._request_of[seq.id], self.controller)

    def _propose(self, spans: Seq[Span]) -> dict[str, float]:
        """Fills in the drafts; returns the seconds of each drafter."""

        def cut(span: Span, draft: Draft) -> Draft:
            answer = self._answer_of[span.seq.id]
            return pruned(draft, answer.sampler, answer.history)

        seconds = self._drafters.propose(spans, cut)
        for span, rows in zip(spans, self.controller.trim(spans), strict=True):
            if rows < len(span.draft):
                span.draft = span.draft.truncated(rows) if rows > 0 else Draft.nothing("the draft was too unlikely")
        return seconds

    def _prepare_masks(self, spans: Seq[Span]) -> None:
        """What the grammars of these allow next, all at once."""
        answers = [self._answer_of[span.seq.id] for span in spans if span.seq.params.grammar and span.reaches_end]
        if answers:
            self._masks.prepare([a.history.matcher(a.sampler.grammar) for a in answers if a.sampler.grammar])

    def _verify(self, span: Span, logits: NDArray[np.floating], best: NDArray[np.int64] | None) -> Verdict | None:
        """The verdict on a span that reaches its sequence's end. A rule that fails ends its own request only."""
        if not span.reaches_end:
            return None
        seq, answer = span.seq, self._answer_of[span.seq.id]
        if best is not None:  # most often, and then every rule says the same
            tokens = answer.sampler.plain_choices(best)
            if tokens is not None:
                return verify_greedy(span.draft, tokens)
        method = seq.spec.verification(self.spec.rejection_sample_method)
        try:
            rows = NodeRows(answer.sampler, logits, answer.history, span.draft, best)
            return rows.settled(verify(span.draft, rows, draws_for(method, seq.seed, len(seq)), method))
        except Exception as error:  # a custom processor may raise anything
            answer.fail(error)
            return None

    def _append(self, span: Span, verdict: Verdict | None, logits: NDArray[np.floating]) -> Outcome:
        answer = self._answer_of[span.seq.id]
        if verdict is None:
            return Outcome(span, finish=answer.finish)
        try:
            outcome = append_tokens(span, verdict, answer, logits)
        except Exception as error:
            answer.fail(error)
            return Outcome(span, finish=answer.finish)
        draft, path = span.draft, outcome.path
        step = draft.n_verify, len(path), len(outcome.new_tokens), draft.reason, draft.by_source(path)
        for stats in (answer.stats, self.metrics.spec_of(self._request_of[span.seq.id].drafter)):
            stats.add_step(*step)
        return outcome

    def _settle(self, seq: Sequence) -> Delta:
        """Hands out what a sequence gained, into the request's mailbox too; retires it if it ended."""
        request, answer = self._request_of[seq.id], self._answer_of[seq.id]
        tokens, logprobs = answer.take()
        if tokens:
            self.metrics.gained(request, answer, len(tokens), time.perf_counter())
        index, segments = request.answers.index(answer), tuple(answer.release())
        delta = Delta(request.id, index, tokens, segments, logprobs, answer.finish)
        request.pending.append(delta)
        if answer.finish is not None:
            self._retire(seq)
        return delta

    def _recover(self) -> None:
        """After a step that was broken off: tokens that were appended stand, all KV of the running is computed anew."""
        for answer in list(self._answer_of.values()):
            if answer.finish is not None:
                self._settle(answer.seq)
        for seq in self.scheduler.preempt_all():
            self._drafters.release(seq)

    def _retire(self, seq: Sequence) -> None:
        """Takes an ended sequence out of the engine."""
        self._drafters.release(seq)
        request = self._request_of.pop(seq.id)
        del self._answer_of[seq.id]
        self.scheduler.remove(seq)
        if all(answer.seq.id not in self._answer_of for answer in request.answers):  # the last one, not just all ended
            del self._requests[request.id]
            self.metrics.ended(request, time.perf_counter())

    def _span_record(self, outcome: Outcome) -> SpanRecord:
        span = outcome.span
        return SpanRecord(
            seq_id=span.seq.id,
            drafter=self._request_of[span.seq.id].drafter,
            rows=span.n_rows,
            drafted=span.draft.n_verify,
            depths=span.draft.depths[: span.draft.n_verify],
            accepted=len(outcome.path),
            emitted=len(outcome.new_tokens),
            reason=span.draft.reason,
            sources=span.draft.by_source(outcome.path),
            path=outcome.path,
        )

    def _record(
        self, plan: Plan, spans: tuple[SpanRecord, ...], clock: list[float], draft_seconds: dict[str, float]
    ) -> StepRecord:
        prompt_rows = sum([max(0, min(span.end, span.seq.n_prompt) - span.start) for span in plan.spans])
        return StepRecord(
            times=StepTimes(*map(sub, clock[1:], clock)),
            prompt_rows=prompt_rows,
            decode_rows=sum([span.n_new for span in plan.spans]) - prompt_rows,
            draft_rows=sum([len(span.draft.tokens) for span in plan.spans]),
            spans=spans,
            free_blocks=self.blocks.n_free,
            preempted=len(plan.preempted),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            draft_seconds=draft_seconds,
        )
