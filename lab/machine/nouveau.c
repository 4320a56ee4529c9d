/* SPDX-License-Identifier: GPL-3.0-or-later
 * A kernel module that is none: what tools read of nouveau's file (modinfo, depmod, the initramfs' makers), and no code. */
#define INFO(name, text) __attribute__((section(".modinfo"), used)) static const char name[] = text
INFO(license, "license=GPL and additional rights");
INFO(description, "description=Stand-in for nouveau of the kubegpu.share lab");
INFO(name_, "name=nouveau");
INFO(alias, "alias=pci:v000010DEd*sv*sd*bc03sc*i*");
INFO(depends, "depends=");
