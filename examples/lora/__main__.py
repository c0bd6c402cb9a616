from examples._cli import start
from examples.lora.main import main

start(main)
