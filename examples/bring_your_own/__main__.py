from examples._cli import start
from examples.bring_your_own.main import main

start(main)
