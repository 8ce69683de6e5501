"""The sampler of a personalised generator: contact sheets while training, and images that `bottega generate` requests."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from bottega.core.errors import UsageError
from bottega.core.types import Models
from bottega.data.image.write import FORMATS
from bottega.data.output_files import is_folder, require_suffix
from bottega.data.prepare.jobs import ProgressCallback
from bottega.tasks.personalize.arms import generate_arm
from bottega.tasks.personalize.contact_sheets import Comparison, write_comparison_sheet
from bottega.tasks.personalize.data.records import pick_evenly_spaced
from bottega.tasks.personalize.image_sampler import PersonalImages, summarize_user
from bottega.tasks.personalize.user_requests import UserRequest, build_user_request, find_users, read_history
from bottega.tasks.sampler import Sampler

if TYPE_CHECKING:
    from bottega.tasks.personalize.workload import PersonalizeWorkload

MAX_IMAGES, MAX_WISH_LENGTH = 10_000, 1000
"""Maximum number of images of a request, and of characters of a wish."""
DEFAULT_COUNT, DEFAULT_NUM_USERS = 4, 4
"""Number of images for each wish, and of users, if the request does not give them."""


@final
class PersonalizeSampler(Sampler):
    """Generates images for users and wishes."""

    requests = ("user", "wish", "history", "count", "seed", "steps", "sampler", "guidance", "negative_prompt")

    def __init__(self, workload: PersonalizeWorkload) -> None:
        self.workload, self.recipe = workload, workload.recipe

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Write a sheet of held-out users: liked images, wish, and images without and with personalisation."""
        prepared = self.workload.data.prepared
        held_out_tables = [name for name in ("validation", "test") if name in prepared.tables]
        rows = self.workload.personal_rows(held_out_tables[0] if held_out_tables else prepared.training_tables[0])
        requests = [
            build_user_request(rows, number) for number in pick_evenly_spaced(len(rows), self.recipe.samples.count)
        ]
        records = [request.record for request in requests]
        keywords = self.workload.generate_keywords(records, models)
        common_options: dict[str, Any] = {"device": device, "seed": self.recipe.seed, "keywords": keywords}
        baseline_images, _ = generate_arm(self.workload, models, records, arm="none", **common_options)
        personalised_images, _ = generate_arm(self.workload, models, records, arm="both", pick=True, **common_options)
        summaries = [summarize_user(request, words) for request, words in zip(requests, keywords, strict=True)]
        comparisons = [Comparison(*row) for row in zip(summaries, baseline_images, personalised_images, strict=True)]
        write_comparison_sheet(comparisons, folder / "sheet.png")

    def generate(
        self,
        models: Models,
        *,
        device: Any,
        user: Any = None,
        wish: Any = None,
        history: Any = None,
        count: int | None = None,
        seed: int = 0,
        stream: Any = None,
        progress: ProgressCallback = lambda stage, done, total: None,
        **options: Any,
    ) -> PersonalImages:
        """Generate `count` images for each user and wish; an image depends on its number and the seed alone."""
        if count is not None and count < 1:
            raise UsageError(f"--count {count}: expected 1 or more")
        _check_wishes(_to_list(wish))
        requests = self._find_requests(_to_list(user), _to_list(wish), history)
        is_default_request = user is None and wish is None and history is None
        images_per_request = count if count is not None else 1 if is_default_request else DEFAULT_COUNT
        total = len(requests) * images_per_request
        if total > MAX_IMAGES:
            raise UsageError(
                f"--count {images_per_request}: {total:,} images are more than the maximum of {MAX_IMAGES:,} per request; "
                "split it into several requests, each with another --seed"
            )
        keywords = self.workload.generate_keywords([request.record for request in requests], models)
        return self.workload.image_sampler.generate(
            models,
            requests,
            keywords,
            images_per_request=images_per_request,
            device=device,
            seed=seed,
            progress=progress,
            **options,
        )

    def _find_requests(self, users: list[str], wishes: list[str], history: Any) -> list[UserRequest]:
        if history is not None and users:
            raise UsageError(
                f"--history {history} describes a new user, but --user {users[0]} is one of this run; give one of the two"
            )
        if history is not None:
            requests = read_history(Path(history), wishes=wishes)
        else:
            tables = [self.workload.personal_rows(name) for name in self._sort_held_out_first()]
            default_users = list(dict.fromkeys(tables[0].users))[: 1 if wishes else DEFAULT_NUM_USERS]
            requests = find_users(users or default_users, tables)
        return [request.with_wish(wish) for request in requests for wish in wishes] if wishes else requests

    def _sort_held_out_first(self) -> list[str]:
        return sorted(self.workload.data.prepared.tables, key=lambda name: name.startswith("train"))

    def example_flags(self) -> str:
        record = self.workload.personal_rows(self._sort_held_out_first()[0]).record(0)
        return f" --user {shlex.quote(record.user)} --wish {shlex.quote(record.wish_or_caption)}"

    def check_output(self, path: Path) -> None:
        if not is_folder(path):
            require_suffix(path, FORMATS)

    def present(self, generated: PersonalImages, out: Path | None, *, run: Path, **request: Any) -> dict[str, Any]:
        return generated.write(out or run / "generated")


def _check_wishes(wishes: list[str]) -> None:
    for wish in wishes:
        if not wish.strip():
            raise UsageError(f'--wish {wish!r} is blank; describe the image, such as --wish "a star"')
        if len(wish) > MAX_WISH_LENGTH:
            raise UsageError(f"--wish has {len(wish):,} characters; shorten it to at most {MAX_WISH_LENGTH:,}")


def _to_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
