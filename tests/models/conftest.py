"""The folders of tiny torch models, made once for the tests of a file."""

import pytest

from tests.models.families._case import torch_folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that returns the folder of a case, the torch module that reads it, and its outputs; they are made once."""
    made = {}

    def get(case):
        if case.name not in made:
            import torch

            folder = tmp_path_factory.mktemp(case.name)
            module = torch_folder(case, folder)
            with torch.no_grad():
                made[case.name] = folder, module, case.run(module, case.inputs).numpy()
        return made[case.name]

    return get
