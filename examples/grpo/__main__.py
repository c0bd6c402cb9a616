from examples._cli import start
from examples.grpo.main import main

start(main)
