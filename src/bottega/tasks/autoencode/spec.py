"""The tasks `image_vae` and `image_tokens`: autoencoders whose latents or codes a generator learns.

Despite their names they also take other media, as data.input selects: `image_vae` audio and video, `image_tokens` audio.
"""

from __future__ import annotations

from bottega.config.task_spec import TaskSpec
from bottega.tasks.autoencode.config import AudioVaeRecipe, ImageVaeRecipe, VideoVaeRecipe
from bottega.tasks.autoencode.tokens_config import AudioTokensRecipe, ImageTokensRecipe

SPECS = (
    TaskSpec(
        name="image_vae",
        recipe=ImageVaeRecipe,
        inputs={"image": ImageVaeRecipe, "audio": AudioVaeRecipe, "video": VideoVaeRecipe},
        open="bottega.tasks.autoencode.vae_workload:open_workload",
        reopen="bottega.tasks.autoencode.vae_workload:reopen_workload",
        prepare="bottega.data.prepare.media:prepare_media",
        unsupported_verbs={
            "generate": "an autoencoder does not generate; bottega train {input} model.vae=RUN trains a generator of its "
            "latents"
        },
    ),
    TaskSpec(
        name="image_tokens",
        recipe=ImageTokensRecipe,
        inputs={"image": ImageTokensRecipe, "audio": AudioTokensRecipe},
        open="bottega.tasks.autoencode.tokens_workload:open_workload",
        reopen="bottega.tasks.autoencode.tokens_workload:reopen_workload",
        prepare="bottega.data.prepare.media:prepare_media",
        unsupported_verbs={
            "generate": "a tokenizer does not generate; train a generator of its codes with model.backbone=tokens "
            "model.tokenizer=RUN"
        },
    ),
)
