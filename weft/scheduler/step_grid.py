"""The grid on which steps end when results must not depend on the company (``--deterministic``).

Job: say how many of a request's next tokens a step may run. Owns: these rules. Does not know: budgets, pages.

* A step of a prompt ends at a multiple of ``size`` tokens of the sequence, or at the prompt's end. Chunks of recurrent
  layers then begin and end at the same tokens whatever the steps.
* A step of a prompt has two tokens at least, since kernels compute a single token as a decode. Only a prompt of one
  token is computed that way.
* No step goes beyond the prompt's end. Generated tokens run one by one, also when a preempted request resumes. Their
  keys, values and states then equal the lost ones.
* A step verifies drafts if all its requests verify equally many, and then computes the bits of decodes. Steps with
  prefills verify none. All tokens of a verification add their keys in splits of one length (``borders``).
"""

from dataclasses import dataclass

from weft.request import Request


@dataclass(frozen=True, slots=True)
class StepGrid:
    """The grid of one scheduler.

    Attributes:
        size: tokens between its points.
        borders: lengths of sequences beyond which attention adds keys in longer splits.
        most_drafts: of a request in a step.
    """

    size: int
    borders: tuple[int, ...] = ()
    most_drafts: int = 0

    def may_verify(self, request: Request) -> bool:
        """Whether the request's next step may verify drafts. It may begin earlier than the scheduler knows, by drafts
        of the step in flight."""
        start, most = request.num_computed_tokens, self.most_drafts
        return not any(start - most < border <= start + most for border in self.borders)

    def reach(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of the next ``num_tokens`` tokens from ``start`` on a step may run."""
        prompt = request.num_prompt_tokens
        if num_tokens <= 0 or start >= prompt:
            return min(num_tokens, 1)
        if start + num_tokens >= prompt:
            return prompt - start
        return max(0, min(start + num_tokens, prompt - 2) // self.size * self.size - start)
