from examples._cli import start
from examples.instruction_tuning.main import main

start(main)
