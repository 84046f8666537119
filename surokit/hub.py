"""Fetch files from the Hugging Face Hub, without waiting for a network that is not there.

The Hub's client retries for half a minute before it admits that nothing answers. One probe of a few seconds decides
here instead; without an answer only the local cache is asked.
"""

from pathlib import Path


def offline_by_choice() -> bool:
    """Return True where the user switched the Hub's client off (HF_HUB_OFFLINE=1); the client then serves its cache at once."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def reachable(timeout_s: float = 5.0) -> bool:
    """Return whether the Hub answers at all within `timeout_s`. False when the user switched it off."""
    if offline_by_choice():
        return False
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=timeout_s)
    except Exception:  # the client's transport decides the exception's type; any of them means "no answer"
        return False
    return True


def fetch(repo_id: str, filename: str, *, online: bool) -> Path:
    """Return the local path of one file of a repository, downloaded when `online`, else from the cache.

    Raises huggingface_hub's EntryNotFoundError (a FileNotFoundError where the cache lacks the file), RepositoryNotFoundError
    or an OSError; callers turn them into a sentence about what the user asked for.
    """
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo_id, filename, local_files_only=not online))
